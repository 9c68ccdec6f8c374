"""Compare policies by exact replay of recorded outputs: `python -m eval replay`.

Plain outputs are recorded once per task. Every policy is replayed on them without the model, at the costs measured on
this machine or those of a file, and compared with the bounds of `eval.bounds`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

import torch

from eval.bounds import MAX_ACCEPTED, CostGrid, clairvoyant, plain_seconds, statics
from eval.config import config_of, parser_of
from eval.figures import table
from eval.measurement import Say, machine, rounded
from eval.replay import Replayed, make, parse_policy, replay
from eval.tasks import STORED, Recorded, ReplayConfig, Task, gather
from eval.traces import Trace
from selfspec.control.registry import CHOOSES_EXIT, POLICIES
from train.configuration import flags_given

STATIC, BY_EXIT, CLAIRVOYANT = "best static (E, D)", "clairvoyant without lookup", "clairvoyant"
BOUNDS = (STATIC, BY_EXIT, CLAIRVOYANT)


def compare(tasks: Sequence[Recorded], config: ReplayConfig, say: Say = lambda text: None) -> list[dict[str, Any]]:
    """One section per length: a row per policy and bound, with its speedup by task."""
    sections = []
    for length in config.lengths:
        say(f"{length} tokens")
        columns = [_column(task, length, config) for task in tasks]
        sections.append({"length": length, "rows": [_row(cells, tasks) for cells in zip(*columns, strict=True)]})
    return sections


class Cell(NamedTuple):
    """The result of a policy or bound in one task."""

    name: str
    kind: str  # "policy" or "bound"
    speedup: float
    figures: dict[str, Any]


def _row(cells: Sequence[Cell], tasks: Sequence[Recorded]) -> dict[str, Any]:
    """A policy or bound over all tasks."""
    pairs = [(task.name, cell) for task, cell in zip(tasks, cells, strict=True)]
    return {
        "name": cells[0].name,
        "kind": cells[0].kind,
        "speedup": {name: cell.speedup for name, cell in pairs},
        "mean": fmean(cell.speedup for cell in cells),
        "tasks": {name: cell.figures for name, cell in pairs},
    }


def _column(task: Recorded, length: int, config: ReplayConfig) -> list[Cell]:
    """All policies and bounds in one task. Every prompt has a new policy."""
    traces = [trace.cut(length) for trace in task.traces]
    costs, grid = task.costs, CostGrid(task.costs, MAX_ACCEPTED)
    plain = plain_seconds(traces, grid)
    prior = task.prior if config.prior == STORED else None
    cells = []
    for name in config.policies or POLICIES:
        settings = _settings(name, task, config)
        done = [replay([trace], make(name, costs, *settings, prior), costs) for trace in traces]
        figures = _figures(done)
        cells.append(Cell(name, "policy", plain / figures["seconds"], figures))
    for name, seconds, found in _bounds(traces, grid):
        cells.append(Cell(name, "bound", plain / seconds, {"seconds": seconds, **found}))
    return cells


def _settings(name: str, task: Recorded, config: ReplayConfig) -> tuple[int | None, int | None]:
    """The exit layer and draft length of a policy that does not choose them itself."""
    if parse_policy(name).kind in CHOOSES_EXIT:
        return None, None
    return config.exit_layer or task.exit_layer, config.num_speculative_tokens or task.num_speculative_tokens


def _figures(done: Sequence[Replayed]) -> dict[str, Any]:
    """The figures of a policy's replays, one replay per prompt."""
    rounds = [round_ for one in done for round_ in one.rounds]
    rows = [row for round_ in rounds for row in round_.rows]
    return {
        "seconds": sum(one.seconds for one in done),
        "seconds_by_prompt": [one.seconds for one in done],
        "num_tokens": sum(one.num_tokens for one in done),
        "num_rounds": len(rounds),
        "num_drafted": sum(row.num_drafted for row in rows),
        "num_accepted": sum(row.num_accepted for row in rows),
        "control_microseconds_per_round": 1e6 * sum(one.control for one in done) / max(1, len(rounds)),
    }


def _bounds(traces: Sequence[Trace], grid: CostGrid) -> Iterator[tuple[str, float, dict[str, Any]]]:
    best = min(statics(traces, grid), key=lambda s: s.seconds)._asdict()
    yield STATIC, best.pop("seconds"), {"settings": best}
    yield BY_EXIT, sum(clairvoyant(trace, grid, ("exit",)) for trace in traces), {}
    yield CLAIRVOYANT, sum(clairvoyant(trace, grid) for trace in traces), {}


def render(tasks: Sequence[Recorded], sections: Sequence[dict[str, Any]], config: ReplayConfig) -> str:
    """A table per length: speedups over plain decoding by task, their mean, and its share of the bounds."""
    parts = list[str]()
    for task in tasks:
        about = task.as_dict()
        name = (task.model or {}).get("model", "traces from a file")
        tokens = f"{about['num_prompts']} prompts, {about['num_tokens']} tokens"
        sampling = "sampled" if about["is_sampled"] else "greedy"
        start = ", from the statistics stored with it" if about["has_prior"] and config.prior == STORED else ""
        parts.append(f"{task.name}: {name}, {about['num_layers']} layers, {tokens}, {sampling}{start}")
    for section in sections:
        rows = section["rows"]
        bounds = {row["name"]: row["mean"] for row in rows if row["kind"] == "bound"}
        columns = ["", *rows[0]["speedup"], "mean", *(f"of the {name}" for name in bounds)]
        cells = [[*row["speedup"].values(), row["mean"], *(row["mean"] / of for of in bounds.values())] for row in rows]
        body = [[row["name"], *(f"{cell:.3f}" for cell in own)] for row, own in zip(rows, cells, strict=True)]
        parts.append(f"{section['length']} tokens; speedup over plain decoding in replay\n\n{table(columns, body)}")
    return "\n\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    """Run the command, and print tables, then one JSON document as the last line; returns the exit code.

    Raises:
        ValueError, OSError, UnsupportedModelError: an option, file or model cannot be used.
    """
    parser = parser_of("replay", ReplayConfig, __doc__)
    add = parser.add_argument
    text = "a task in addition to those of the configuration, or in place of the one of the same name"
    add("--task", nargs=3, action="append", default=[], metavar=("NAME", "MODEL", "QUESTIONS"), help=text)
    add("--traces", nargs="+", default=[], metavar="FILE", help="replay these; nothing is decoded")
    add("--costs", metavar="FILE", help="JSON file of costs, instead of measuring them here")
    add("--record-traces", metavar="FOLDER", help="save traces of plain outputs in this folder")
    add("--output", metavar="FOLDER", help="also write replay.json and costs.json into this folder")
    options = parser.parse_args(arguments)
    config = config_of(ReplayConfig, options.config, flags_given(options))
    given = {name: Task(name, model, questions) for name, model, questions in options.task}
    tasks_of = [*(task for task in config.tasks if task.name not in given), *given.values()]
    config = replace(config, tasks=tasks_of)
    if config.threads:
        torch.set_num_threads(config.threads)
    start = perf_counter()

    def say(text: str) -> None:
        print(f"[{perf_counter() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    environment = machine()
    tasks = gather(config, options.traces, options.costs, options.record_traces, say)
    sections = compare(tasks, config, say)
    record = {"environment": environment, "config": asdict(config), "tasks": [task.as_dict() for task in tasks]}
    document = json.dumps(rounded({**record, "sections": sections, "seconds": perf_counter() - start}))
    if options.output:
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "costs.json").write_text(json.dumps({task.name: task.costs.as_dict() for task in tasks}), "utf-8")
        (folder / "replay.json").write_text(document + "\n", "utf-8")
    print(render(tasks, sections, config), end="\n\n")
    print(document)
    return 0
