"""Compare policies by exact replay of recorded outputs: `python -m eval replay`.

Plain outputs are recorded once per task. Every policy is then replayed on them without the model, at the costs measured
on this machine and at other costs of the output head, beside the bounds of `eval.bounds`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from eval import plots, task_command
from eval.bounds import MOST_ACCEPTED, CostGrid, clairvoyant, plain_seconds, statics
from eval.replay import Replayed, make, parse_policy, replay
from eval.table import table
from eval.tasks import MEASURED, STORED, Recorded, ReplayConfig, gather
from eval.timing import Say
from selfspec.control.cost_table import Table
from selfspec.control.costs import Costs
from selfspec.control.registry import CHOOSES_EXIT, POLICIES

STATIC, STOPPED = "best static (E, D)", "best static (E, D, stop)"
BY_EXIT, CLAIRVOYANT = "clairvoyant without lookup", "clairvoyant"
BOUNDS = (STATIC, STOPPED, BY_EXIT, CLAIRVOYANT)


def with_head(costs: Costs, layers: float) -> Costs:
    """The same machine with a head that costs as much as `layers` layers of a plain forward, at any width."""
    one = costs.plain(1) / costs.num_layers
    grows = [costs.late[1](n) / costs.late[1](1) for n in costs.head.points]
    head = Table(costs.head.points, tuple(layers * one * g for g in grows))
    copies = costs.copies
    if copies is not None:
        copies = replace(copies, head=copies.head.scaled(head(1) / max(costs.head(1), 1e-12)))
    return replace(costs, head=head, copies=copies, plain_head=None)


def compare(tasks: Sequence[Recorded], config: ReplayConfig, say: Say = lambda text: None) -> list[dict[str, Any]]:
    """One section per length and head cost; a row per policy and bound, with its speedup over plain by task."""
    sections = []
    for length in config.lengths:
        for head in config.head_layers:
            say(f"{length} tokens, head: {head if head == MEASURED else f'{head} layers'}")
            columns = [_column(task, length, head, config) for task in tasks]
            rows = [_row(same, tasks) for same in zip(*columns, strict=True)]
            sections.append({"length": length, "head_layers": head, "rows": rows})
    return sections


class Cell(NamedTuple):
    """The result of a policy or bound in one task."""

    name: str
    kind: str  # "policy" or "bound"
    speedup: float
    figures: dict[str, Any]


def _row(cells: Sequence[Cell], tasks: Sequence[Recorded]) -> dict[str, Any]:
    """A policy or bound over all tasks."""
    names = [task.name for task in tasks]
    return {
        "name": cells[0].name,
        "kind": cells[0].kind,
        "speedup": {name: cell.speedup for name, cell in zip(names, cells, strict=True)},
        "mean": fmean(cell.speedup for cell in cells),
        "tasks": {name: cell.figures for name, cell in zip(names, cells, strict=True)},
    }


def _column(task: Recorded, length: int, head: str, config: ReplayConfig) -> list[Cell]:
    """One task's cells from top to bottom."""
    traces = [trace.cut(length) for trace in task.traces]
    costs = task.costs if head == MEASURED else with_head(task.costs, float(head))
    grid = CostGrid(costs, MOST_ACCEPTED)
    plain = plain_seconds(traces, grid)
    prior = task.prior if config.prior == STORED else None
    cells = []
    for name in config.policies or POLICIES:
        told = _told(name, task, config)
        # Every prompt has a policy of its own, which knows nothing of the other prompts.
        done = [replay([trace], make(name, costs, *told, prior), costs) for trace in traces]
        figures = _figures(done)
        cells.append(Cell(name, "policy", plain / figures["seconds"], figures))
    for name, seconds, settings in _bounds(traces, grid):
        cells.append(Cell(name, "bound", plain / seconds, {"seconds": seconds, **settings}))
    return cells


def _told(name: str, task: Recorded, config: ReplayConfig) -> tuple[int | None, int | None]:
    """The exit layer and draft length for a policy that does not choose them itself."""
    if parse_policy(name).kind in CHOOSES_EXIT:
        return None, None
    return config.exit_layer or task.exit_layer, config.num_draft_tokens or task.num_draft_tokens


def _figures(done: Sequence[Replayed]) -> dict[str, Any]:
    """Of a policy's replays, one per prompt."""
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


def _bounds(traces: Sequence[Any], grid: CostGrid) -> Iterator[tuple[str, float, dict[str, Any]]]:
    tried = list(statics(traces, grid))
    for name, among in ((STATIC, [s for s in tried if s.min_confidence == 0]), (STOPPED, tried)):
        best = min(among, key=lambda s: s.seconds)
        settings = best._asdict()
        yield name, settings.pop("seconds"), {"settings": settings}
    yield BY_EXIT, sum(clairvoyant(trace, grid, ("exit",)) for trace in traces), {}
    yield CLAIRVOYANT, sum(clairvoyant(trace, grid) for trace in traces), {}


def render(record: dict[str, Any]) -> str:
    """Per length: every policy by task at the first head cost; its mean by head cost, and beside the bounds."""
    return "\n\n".join(_parts(record))


def _parts(record: dict[str, Any]) -> Iterator[str]:
    config = record["config"]
    for task in record["tasks"]:
        name = (task["model"] or {}).get("model", "traces from a file")
        tokens = f"{task['num_prompts']} prompts, {task['num_tokens']} tokens"
        picked = "sampled" if task["is_sampled"] else "greedy"
        start = ", from the statistics stored with it" if task["has_prior"] and config["prior"] == STORED else ""
        yield f"{task['name']}: {name}, {task['num_layers']} layers, {tokens}, {picked}{start}"
    for length in config["lengths"]:
        sections = [section for section in record["sections"] if section["length"] == length]
        heads = [section["head_layers"] for section in sections]
        names = list(sections[0]["rows"][0]["speedup"])
        figures = [[row["name"], *row["speedup"].values(), row["mean"]] for row in sections[0]["rows"]]
        title = f"{length} tokens, head: {heads[0]}; speedup over plain decoding in replay"
        yield f"{title}\n\n{_table(['', *names, 'mean'], figures)}"
        same = list(zip(*(section["rows"] for section in sections), strict=True))
        if len(sections) > 1:
            means = [[rows[0]["name"], *(row["mean"] for row in rows)] for rows in same]
            title = f"{length} tokens: mean over tasks by what the head costs, in layers"
            yield f"{title}\n\n{_table(['', *heads], means)}"
        title = f"{length} tokens: the mean over that of the {STOPPED}, of the {BY_EXIT} and of the {CLAIRVOYANT}"
        bounds = [{row["name"]: row["mean"] for row in section["rows"]} for section in sections]
        shares = [
            [rows[0]["name"], *(_shares(row["mean"], of) for row, of in zip(rows, bounds, strict=True))]
            for rows in same
            if rows[0]["kind"] == "policy"
        ]
        yield f"{title}; by what the head costs, in layers\n\n{_table(['', *heads], shares)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return table(columns, [[f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row] for row in rows])


def _shares(mean: float, bounds: dict[str, float]) -> str:
    return ", ".join(f"{mean / bounds[name]:.3f}" for name in (STOPPED, BY_EXIT, CLAIRVOYANT))


def main(arguments: Sequence[str]) -> int:
    """The exit code.

    Raises:
        ValueError, OSError, UnsupportedModelError: something asked for is not possible.
    """
    parser = task_command.parser_of("replay", ReplayConfig, __doc__)
    parser.add_argument("--traces", nargs="+", default=[], metavar="FILE", help="replay these; nothing is decoded")
    parser.add_argument("--costs", metavar="FILE", help="JSON file of costs, instead of measuring them here")
    options = parser.parse_args(arguments)
    config = task_command.configured(ReplayConfig, options)

    def measured(say: Say, folder: Path | None) -> dict[str, Any]:
        tasks = gather(config, options.traces, options.costs, options.record_traces, say)
        sections = compare(tasks, config, say)
        if folder is not None:
            costs = {task.name: task.costs.as_dict() for task in tasks}
            (folder / "costs.json").write_text(json.dumps(costs) + "\n", "utf-8")
            plots.plot_policies(max(sections, key=lambda s: s["length"])["rows"], folder / "policies.svg")
        return {"benchmark": "replay", "tasks": [task.as_dict() for task in tasks], "sections": sections}

    return task_command.run(options, config, measured, render)
