"""Profiles: measurements that are kept as small JSON files in the user's cache folder.

`costs-*.json` holds the cost table for a model's shape and a machine; it does not depend on weights. `prior-*.json`
holds acceptance statistics of earlier runs for a model's weights; it does not depend on the machine. A file that is
damaged, or belongs to another model or machine, is ignored with a warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from selfspec.calibrate.measure import measure
from selfspec.control.costs import Copies, Costs, Table
from selfspec.files import write_whole
from selfspec.kernels.machine import cache_folder, warn_not_kept
from selfspec.model.fingerprint import device_name, heads_of, shape_of, weights_of
from selfspec.model.split_model import SplitModel
from selfspec.version import __version__

SCHEMA = 24  # version of costs files; files of other versions are not read
PRIOR_SCHEMA = 2  # version of prior files
STORED = "selfspec-prior.json"  # in a model's folder
MOST_ROWS = 32  # largest batch measured at first use; tables extrapolate beyond
ABOUT = {
    "costs": "Seconds of decoding rounds on this machine, measured by selfspec. Safe to delete.",
    "prior": "How often drafts of this model were right in earlier runs, kept by selfspec. Safe to delete.",
}
Kind = Literal["costs", "prior"]
_log = logging.getLogger("selfspec")


def folder() -> Path:
    """The folder of profiles, below $SELFSPEC_CACHE if it is set.

    Raises:
        OSError: the user has no home folder.
    """
    return cache_folder() / "profiles"


def costs_key(split: SplitModel) -> dict[str, Any]:
    """Everything that costs depend on: the model's shape, engine, device, number of threads and versions."""
    return {
        "schema": SCHEMA,
        **shape_of(split),
        "engine": split.backend,
        **({"packed": split.compiled.num_bytes} if split.compiled is not None else {}),
        **({"exact": split.wide} if split.wide else {}),
        **({"recorded": str(split.recorded or "views")} if split.runner is not None else {}),
        "exit_heads": None if split.exit_heads is None else [split.exit_heads.inner_size, *split.exit_heads.layers],
        **({"ranks": split.ranks.count} if split.ranks is not None else {}),
        "device": device_name(split.device),
        "dtype": str(split.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "selfspec": __version__,
    }


def prior_key(split: SplitModel) -> dict[str, Any]:
    """Everything that acceptance depends on: the model, its weights, adapters and exit heads."""
    return {"schema": PRIOR_SCHEMA, **shape_of(split), "weights": weights_of(split), "exit_heads": heads_of(split)}


def path_of(kind: Kind, key: Mapping[str, Any]) -> Path:
    """The file of a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder() / f"{kind}-{digest[:16]}.json"


def costs_of(split: SplitModel, batch_size: int = 1) -> Costs:
    """The saved costs. What they lack for this batch size is measured now and saved."""
    known = split.agreed(read_costs(split))
    if known is not None and covers(known, batch_size):
        return known
    done = () if known is None else known.rounds
    sizes = [1 << i for i in range(MOST_ROWS.bit_length()) if 1 << i < 2 * min(batch_size, MOST_ROWS)]
    costs = measure(split, [size for size in sizes if size not in done])
    if known is not None:
        costs = _merge(known, costs)
    save_costs(split, costs)
    return costs


def covers(costs: Costs, batch_size: int) -> bool:
    """Whether the costs include this batch size, or the largest that is measured."""
    most = MOST_ROWS if costs.recorded is None else min(MOST_ROWS, 1 << (costs.recorded.rows.bit_length() - 1))
    return max(costs.rounds) >= min(batch_size, most)


def read_costs(split: SplitModel) -> Costs | None:
    """The saved costs; None where there are no usable ones."""
    key = costs_key(split)
    given = _read("costs", key, "measuring again")
    if given is None:
        return None
    try:
        costs = Costs.from_dict(given)
        if costs.num_layers != split.num_layers:
            raise ValueError(f"costs of {costs.num_layers} layers for a model of {split.num_layers}")
        if not costs.plain_round(1) > 0:
            raise ValueError("a plain round takes no time")
        return costs
    except ValueError as problem:
        _warn_unusable("costs", key, str(problem), "measuring again")
        return None


def save_costs(split: SplitModel, costs: Costs) -> Path | None:
    """Save costs and return the file; None, with a warning, where it cannot be written."""
    return _write("costs", costs_key(split), costs.as_dict())


def read_prior(split: SplitModel) -> dict[str, Any] | None:
    """The saved acceptance statistics of these weights; None where there are no usable ones."""
    key = prior_key(split)
    given = _read("prior", key, "starting without it")
    if given is None or isinstance(given, dict):
        return given
    _warn_unusable("prior", key, f"a {type(given).__name__} where an object belongs", "starting without it")
    return None


def stored_prior(path: Path, split: SplitModel) -> Any:
    """The acceptance statistics in a file in the model's folder; None where there are none for these weights."""
    try:
        given = json.loads(path.read_bytes(), parse_constant=_reject_constant)
        return given["prior"] if given["of"] == _stored_of(split) else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def store_prior(folder: Path, split: SplitModel, prior: Mapping[str, Any]) -> Path:
    """Write acceptance statistics into a model's folder, for the first use on other machines.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps({"about": ABOUT["prior"], "of": _stored_of(split), "prior": dict(prior)}, allow_nan=False)
    path = folder / STORED
    write_whole(path, lambda stream: stream.write(f"{text}\n".encode()))
    return path


def _stored_of(split: SplitModel) -> list[str]:
    """The key of a stored prior, which does not depend on versions of libraries."""
    return [weights_of(split), heads_of(split)]


def save_prior(split: SplitModel, prior: Mapping[str, Any]) -> Path | None:
    """Save acceptance statistics for these weights.

    Args:
        prior: a mapping that JSON can represent.

    Raises:
        ValueError: it contains NaN or infinity.
        TypeError: JSON cannot represent it.
    """
    return _write("prior", prior_key(split), dict(prior))


def _merge(known: Costs, more: Costs) -> Costs:
    """`known`, with the points that only `more` has: further batch sizes, and larger numbers of tokens."""

    def both(old: Table, new: Table) -> Table:
        return Table.of({p: s for t in (new, old) for p, s in zip(t.points, t.seconds, strict=True)})

    copies = known.copies or more.copies
    if known.copies is not None and more.copies is not None:
        steps = {**more.copies.steps, **known.copies.steps}
        copies = Copies(steps, both(known.copies.head, more.copies.head))
    return replace(
        known,
        rounds={**more.rounds, **known.rounds},
        steps={**more.steps, **known.steps},
        head=both(known.head, more.head),
        context=both(known.context, more.context),
        copies=copies,
    )


def _read(kind: Kind, key: Mapping[str, Any], instead: str) -> Any:
    """The content of the key's file; None without a warning where no file can be opened."""
    try:
        raw = path_of(kind, key).read_bytes()
    except OSError:
        return None
    try:
        content = json.loads(raw, parse_constant=_reject_constant)
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__} where an object belongs")
        if content.get("key") != key:
            raise ValueError("it is of another model, machine or version")
        return content[kind]
    except KeyError:
        reason = f"it holds no {kind}"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as problem:  # bad JSON and bad UTF-8 among them
        reason = str(problem) if raw.strip() else "empty"
    _warn_unusable(kind, key, reason, instead)
    return None


def _write(kind: Kind, key: Mapping[str, Any], content: Mapping[str, Any]) -> Path | None:
    """Write the key's file and return it; None, with a warning, where it cannot be written."""
    whole = {"about": ABOUT[kind], "key": dict(key), kind: content}
    text = json.dumps(whole, indent=1, allow_nan=False) + "\n"
    try:
        place = folder()
        path = path_of(kind, key)
        place.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda stream: stream.write(text.encode()))
        return path
    except OSError as problem:
        warn_not_kept(problem)
        return None


def _warn_unusable(kind: Kind, key: Mapping[str, Any], reason: str, instead: str) -> None:
    _log.warning("the profile %s is of no use (%s); %s", path_of(kind, key), " ".join(reason.split()), instead)


def _reject_constant(constant: str) -> float:
    raise ValueError(f"{constant} is no number")
