"""`Trace`: what every layer would have drafted along a finished output, so that any policy can be replayed on it.

`eval.recording` makes traces. A file holds several of them, with the acceptance statistics stored with their model.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

VERSION = 5  # of the file format
WRONG_STEPS = 17  # tokens recorded after a wrong one: with it, the longest draft of any policy

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
_BY_TOKEN = ("hits", "confidences", "divergences", "wrong", "seconds", "short_hits", "short_confidences")


@dataclass(frozen=True, eq=False)
class Trace:
    """One finished output of n tokens by a model of L layers; row e - 1 of each array is exit layer e.

    Attributes:
        prompt, tokens: token ids, of the prompt and of the output.
        hits: bool `[L - 1, n]`, whether the layer would have picked the output's token.
        confidences: `[L - 1, n]`, the probability of the layer's pick under it.
        divergences: `[L - 1, n]`, KL(whole model || layer) in nats.
        wrong: `[L - 1, n, steps]`, the confidences of what the layer would have drafted after a wrong pick; NaN
            elsewhere.
        seconds: bool `[L - 1, n]`, whether the output's token would have been the layer's second choice.
        short_hits, short_confidences: `[L - 1, n]`, hits and confidences as shadow picks over a shortlist see them.
        prompt_hits, prompt_confidences: `[L - 1, up to SEED_POSITIONS]`, the same at the prompt's last positions.
        copied_right: int16 `[C, n]`, how many tokens are right of what 4-bit copies of the first 1..C layers draft from
            each position on; C is 0 where the model has no copies.
        copied: `[C, n, steps]`, the confidences of what the copies draft; NaN beyond the context.
        is_sampled: whether the output was sampled rather than greedy.
    """

    task: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    hits: Bools
    confidences: Floats
    divergences: Floats
    wrong: Floats
    seconds: Bools
    short_hits: Bools
    short_confidences: Floats
    prompt_hits: Bools
    prompt_confidences: Floats
    copied_right: NDArray[np.int16] = field(default_factory=lambda: np.zeros((0, 0), np.int16))
    copied: Floats = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    is_sampled: bool = False

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def num_layers(self) -> int:
        return len(self.hits) + 1

    def cut(self, num_tokens: int) -> Trace:
        """The same output, ended after `num_tokens`."""
        cut = {name: getattr(self, name)[:, :num_tokens] for name in (*_BY_TOKEN, "copied_right", "copied")}
        return dataclasses.replace(self, tokens=self.tokens[:num_tokens], **cut)


def save(traces: Sequence[Trace], path: str | Path, prior: Any = None) -> None:
    """Write traces into one `.npz` file, whole or not at all.

    Args:
        prior: the acceptance statistics stored with their model, plain numbers; None: there are none.
    """
    arrays: dict[str, Any] = {"version": np.array(VERSION), "count": np.array(len(traces))}
    for i, trace in enumerate(traces):
        arrays |= {f"{i}.{f.name}": np.asarray(getattr(trace, f.name)) for f in dataclasses.fields(Trace)}
    if prior is not None:
        arrays["prior"] = np.array(json.dumps(prior))
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    partial.replace(path)


def load(path: str | Path) -> tuple[list[Trace], Any]:
    """The traces of a file that `save` wrote, and the statistics beside them, or None.

    Raises:
        ValueError: the file is missing, damaged, of another format, or its arrays do not fit together.
    """
    try:
        with Path(path).open("rb") as file, np.lib.npyio.NpzFile(file) as arrays:
            version = int(arrays["version"]) if "version" in arrays else 1
            if version != VERSION:
                raise ValueError(f"its format is {version} and this reads {VERSION}; record the outputs again")
            prior = json.loads(str(arrays["prior"])) if "prior" in arrays else None
            return [_trace(arrays, i) for i in range(int(arrays["count"]))], prior
    except (OSError, KeyError, TypeError, ValueError, EOFError, BadZipFile, zlib.error) as problem:
        raise ValueError(f"cannot read the traces {str(path)!r}: {' '.join(str(problem).split())}") from problem


def _trace(arrays: Any, i: int) -> Trace:
    given = {f.name: arrays[f"{i}.{f.name}"] for f in dataclasses.fields(Trace)}
    given |= {
        "task": str(given["task"]),
        "prompt": tuple(int(t) for t in given["prompt"]),
        "tokens": tuple(int(t) for t in given["tokens"]),
        "is_sampled": bool(given["is_sampled"]),
    }
    shape = (len(given["hits"]), len(given["tokens"]))
    shapes = {given[name].shape[:2] for name in _BY_TOKEN}
    copied, right = given["copied"], given["copied_right"]
    if (
        shapes != {shape}
        or copied.shape[:2] != right.shape
        or (len(right) and right.shape[1] != shape[1])
        or given["prompt_hits"].shape != given["prompt_confidences"].shape
    ):
        raise ValueError(f"the arrays of output {i} do not fit together")
    return Trace(**given)
