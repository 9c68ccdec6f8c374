"""`selfspec calibrate`: measure a model's costs on this machine thoroughly, keep them, and show what they imply."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from selfspec.cli.failure import RUN, Failure, as_sentences
from selfspec.cli.options import Calibrate
from selfspec.cli.talk import Talk, make_console

REPEATS, WITHIN = 20, 60.0  # no further repeat is begun after so many seconds


def calibrate(options: Calibrate) -> None:
    """Measure, save, and write the tables or one JSON document."""
    options.check()
    sizes = options.sizes
    with Talk(options.quiet) as talk:
        with talk.waiting("importing torch and transformers"):
            from selfspec import hub
            from selfspec.calibrate import forecast, profile
            from selfspec.kernels.machine import set_threads

        set_threads(options.threads)
        with as_sentences(), talk.waiting(f"loading {options.model}"):
            target = hub.open_target(options.model, **options.parts)
        costs = _measured(target, sizes, options.model, talk)
        file = profile.save_costs(target.stack, costs)
    key = profile.costs_key(target.stack)
    plans: dict[str, list[Any]] = {}
    if options.plan:
        rates = forecast.rates_of(profile.read_prior(target.stack), costs.num_layers)
        plans = {"assumed": forecast.assumed(costs, sizes), "seen": forecast.seen(costs, sizes, rates)}
    if options.as_json:
        document = {"model": options.model, "file": None if file is None else str(file), "key": key}
        document["costs"] = costs.as_dict()
        if options.plan:
            document["plan"] = {name: [asdict(choice) for choice in choices] for name, choices in plans.items()}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        _write(make_console(sys.stdout), options.model, key, costs, sizes, plans)
        sys.stdout.write("" if file is None else f"\nsaved in {file}\n")
    sys.stdout.flush()


def _measured(target: Any, sizes: Sequence[int], model: str, talk: Talk) -> Any:
    import torch

    from selfspec.calibrate.measure import measure

    with talk.waiting(f"measuring {model}"):
        try:
            return measure(target.stack, sizes, REPEATS, within=WITHIN)
        except torch.OutOfMemoryError as problem:
            sentence = f"the device ran out of memory at up to {sizes[-1]} rows; lower --batch-sizes"
            raise Failure(sentence, RUN) from problem
        except ValueError as problem:  # a model of one layer
            raise Failure(str(problem), RUN) from problem


def _write(
    out: Console, model: str, key: dict[str, Any], costs: Any, sizes: Sequence[int], plans: dict[str, list[Any]]
) -> None:
    from selfspec.cli import tables

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
