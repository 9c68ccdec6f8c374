"""`selfspec calibrate`: measure a model's costs on this machine thoroughly, keep them, and show what they imply."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.text import Text
from typer import Option

from selfspec.cli.failure import RUN, Failure
from selfspec.cli.options import Json, ModelArgument, ModelOptions, Quiet, numbers
from selfspec.cli.session import open_llm
from selfspec.cli.status import StatusConsole, make_console

if TYPE_CHECKING:
    from selfspec.calibrate.forecast import Choice
    from selfspec.control.costs import Costs
    from selfspec.model.split_model import SplitModel

REPEATS, MAX_SECONDS = 20, 60.0  # no further repeat is begun after so many seconds
DEFAULT_SIZES = "1,2,4,8"


def calibrate(
    *,
    model: ModelArgument,
    options: ModelOptions,
    batch_sizes: Annotated[
        list[str] | None,
        Option(help=f"Rows decoded together; may be repeated. Default: {DEFAULT_SIZES}.", metavar="B,B,..."),
    ] = None,
    plan: Annotated[bool, Option("--plan", help="Also show how far to draft, by batch size.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure, save, and write the tables or one JSON document."""
    given = numbers("batch_sizes", batch_sizes or [DEFAULT_SIZES], 1, 1024, f", such as {DEFAULT_SIZES}")
    sizes = sorted({1, *given})
    with StatusConsole(quiet) as status:
        with status.waiting("importing torch and transformers"):
            from selfspec.calibrate import forecast, profile

        with status.waiting(f"loading {model}"):
            split = open_llm(model, options).target.split
        with status.waiting(f"measuring {model}"):
            costs = _measured(split, sizes)
        file = profile.save_costs(split, costs)
    key = profile.costs_key(split)
    plans: dict[str, list[Choice]] = {}
    if plan:
        rates = forecast.rates_of(profile.read_prior(split), costs.num_layers)
        plans = {"assumed": forecast.assumed(costs, sizes), "seen": forecast.seen(costs, sizes, rates)}
    if as_json:
        document = {"model": model, "file": None if file is None else str(file), "key": key}
        document["costs"] = costs.as_dict()
        if plan:
            document["plan"] = {name: [asdict(choice) for choice in choices] for name, choices in plans.items()}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        _write(make_console(sys.stdout), model, key, costs, sizes, plans)
        sys.stdout.write("" if file is None else f"\nsaved in {file}\n")
    sys.stdout.flush()


def _measured(split: SplitModel, sizes: Sequence[int]) -> Costs:
    import torch

    from selfspec.calibrate.measure import measure

    try:
        return measure(split, sizes, REPEATS, within=MAX_SECONDS)
    except torch.OutOfMemoryError as problem:
        sentence = f"the device ran out of memory at up to {sizes[-1]} rows; lower --batch-sizes"
        raise Failure(sentence, RUN) from problem
    except ValueError as problem:  # a model of one layer
        raise Failure(str(problem), RUN) from problem


def _write(
    out: Console, model: str, key: dict[str, Any], costs: Costs, sizes: Sequence[int], plans: dict[str, list[Choice]]
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
