"""`selfspec calibrate`: measure a model's costs on this machine thoroughly, keep them, and show what they imply."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from selfspec.commands.failure import RUN, Failure, as_sentences
from selfspec.commands.threads import check_threads, set_threads

DEFAULT_BATCH_SIZES = (1, 2, 4, 8)
MOST_ROWS = 1024
REPEATS, WITHIN = 20, 60.0  # no further repeat is begun after so many seconds


def calibrate(
    model: str,
    parts: Mapping[str, Any],
    threads: int | None,
    batch_sizes: Sequence[str],
    plan: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure, save, and write the tables or one JSON document.

    Args:
        parts: what else `selfspec.load` is told, by name.
    """
    sizes = sorted({1, *parse_sizes(batch_sizes)})
    check_threads(threads)
    from selfspec import hub, show
    from selfspec.calibrate import profile  # torch and transformers, from here on

    set_threads(threads)
    with as_sentences():
        target = hub.open_target(model, **parts)
    costs = _measure(target, sizes, _progress(model, show.make_console(sys.stderr, quiet=quiet)))
    file = profile.save_costs(target.stack, costs)
    key = profile.costs_key(target.stack)
    plans = _plans(target, costs, sizes) if plan else {}
    if as_json:
        document = {"model": model, "file": None if file is None else str(file), "key": key, "costs": costs.as_dict()}
        if plan:
            document["plan"] = {name: [asdict(choice) for choice in choices] for name, choices in plans.items()}
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()
        return
    _write(show.make_console(sys.stdout), model, key, costs, sizes, plans)
    if file is not None:
        sys.stdout.write(f"\nsaved in {file}\n")


def parse_sizes(given: Sequence[str]) -> list[int]:
    """Batch sizes from texts such as "1,2,4" and "8"."""
    parts = [part.strip() for text in given for part in text.split(",")] or [*map(str, DEFAULT_BATCH_SIZES)]
    for part in parts:
        if not (part.isascii() and part.isdecimal() and len(part) < 9 and 1 <= int(part) <= MOST_ROWS):
            raise Failure(f"--batch-sizes must be whole numbers in 1..{MOST_ROWS}, such as 1,2,4,8, got {part!r}")
    return [int(part) for part in parts]


def _measure(target: Any, sizes: Sequence[int], say: Callable[[str], None]) -> Any:
    import torch

    from selfspec.calibrate.measure import measure

    try:
        return measure(target.stack, sizes, REPEATS, within=WITHIN, say=say)
    except torch.OutOfMemoryError as problem:
        sentence = f"the device ran out of memory at up to {sizes[-1]} rows; lower --batch-sizes"
        raise Failure(sentence, RUN) from problem
    finally:
        say("")


def _progress(model: str, talk: Console) -> Callable[[str], None]:
    """On a terminal one line that is rewritten and in the end taken back, elsewhere a line at the start."""
    shown = 0

    def say(text: str) -> None:
        nonlocal shown
        line = f"measuring {model}, best on an idle machine" if text else ""
        if talk.is_terminal:
            line += ": " * bool(text) + text
            talk.print(Text(line.ljust(shown), "dim"), end="\r", soft_wrap=True)
        elif line and not shown:
            talk.print(Text(line), soft_wrap=True)
        shown = max(shown, len(line))

    return say


def _plans(target: Any, costs: Any, sizes: Sequence[int]) -> dict[str, list[Any]]:
    """What the costs imply for assumed acceptance rates, and for those that the model's own prior tells of."""
    from selfspec.calibrate import profile
    from selfspec.commands import forecast

    rates = forecast.rates_of(profile.read_prior(target.stack), costs.num_layers)
    return {"assumed": forecast.assumed(costs, sizes), "seen": forecast.seen(costs, sizes, rates)}


def _write(
    out: Console, model: str, key: dict[str, Any], costs: Any, sizes: Sequence[int], plans: dict[str, list[Any]]
) -> None:
    from selfspec.commands import tables

    threads = f"{key['threads']} thread" + "s" * (key["threads"] > 1)
    facts = [key["architecture"], f"{key['num_layers']} layers", key["device"], key["dtype"], key["engine"], threads]
    out.print(Text.assemble((model, "bold"), "  ", (" · ".join(facts), "dim")), soft_wrap=True)
    made = [tables.by_rows(costs, sizes), tables.by_tokens(costs)]
    if plans:
        made.append(tables.assumed(plans["assumed"]))
    if plans.get("seen"):
        made.append(tables.seen(plans["seen"]))
    for title, table in made:
        out.print(Text(f"\n{title}", "bold"), soft_wrap=True)
        out.print(table)
