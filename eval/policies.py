"""Compare policies by exact replay of recorded outputs: `python -m eval replay`.

Plain outputs are recorded once per task. Every policy is replayed on them without the model, at the costs measured on
this machine and at other costs of the output head, and compared with the bounds of `eval.bounds`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from eval.bounds import MAX_ACCEPTED, CostGrid, clairvoyant, plain_seconds, statics
from eval.figures import plot_policies, table
from eval.measurement import Say
from eval.replay import Replayed, make, parse_policy, replay
from eval.tasks import MEASURED, STORED, Recorded, ReplayConfig, configured, gather, parser_of, run_command
from selfspec.control.costs import ByRows, Copies, Costs, Table
from selfspec.control.registry import CHOOSES_EXIT, POLICIES

STATIC, STOPPED = "best static (E, D)", "best static (E, D, stop)"
BY_EXIT, CLAIRVOYANT = "clairvoyant without lookup", "clairvoyant"
BOUNDS = (STATIC, STOPPED, BY_EXIT, CLAIRVOYANT)


def with_head(costs: Costs, layers: float) -> Costs:
    """Costs with an output head that takes as long as `layers` layers of a plain round, at any number of tokens."""
    of_layers = max(0.0, costs.plain_round(1) - costs.head(1))
    if not costs.head(1):
        raise ValueError("costs without a head cannot have another one; give costs that were measured")
    head = costs.head.scaled(layers * of_layers / costs.num_layers / costs.head(1))

    def other(tables: ByRows, num_tokens: Callable[[int], int], old: Table = costs.head, new: Table = head) -> ByRows:
        """Tables with another head, which runs over `num_tokens` tokens per row."""

        def changed(rows: int, table: Table) -> Table:
            tokens = {p: num_tokens(p) * rows for p in table.points}
            return Table.of({p: max(0.0, table(p) - old(n)) + new(n) for p, n in tokens.items()})

        return {rows: changed(rows, table) for rows, table in tables.items()}

    copies = costs.copies
    if copies is not None:
        new = copies.head.scaled(head(1) / costs.head(1))
        copies = Copies(other(copies.steps, lambda exit_layer: 1, copies.head, new), new)
    rounds, steps = other(costs.rounds, lambda width: width), other(costs.steps, lambda exit_layer: 1)
    return replace(costs, rounds=rounds, steps=steps, head=head, copies=copies)


def compare(tasks: Sequence[Recorded], config: ReplayConfig, say: Say = lambda text: None) -> list[dict[str, Any]]:
    """One section per length and head cost: a row per policy and bound, with its speedup by task."""
    sections = []
    for length in config.lengths:
        for head in config.head_layers:
            say(f"{length} tokens, head: {head if head == MEASURED else f'{head} layers'}")
            columns = [_column(task, length, head, config) for task in tasks]
            rows = [_row(cells, tasks) for cells in zip(*columns, strict=True)]
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
    pairs = [(task.name, cell) for task, cell in zip(tasks, cells, strict=True)]
    return {
        "name": cells[0].name,
        "kind": cells[0].kind,
        "speedup": {name: cell.speedup for name, cell in pairs},
        "mean": fmean(cell.speedup for cell in cells),
        "tasks": {name: cell.figures for name, cell in pairs},
    }


def _column(task: Recorded, length: int, head: str, config: ReplayConfig) -> list[Cell]:
    """All policies and bounds in one task. Every prompt has a new policy."""
    traces = [trace.cut(length) for trace in task.traces]
    costs = task.costs if head == MEASURED else with_head(task.costs, float(head))
    grid = CostGrid(costs, MAX_ACCEPTED)
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


def _bounds(traces: Sequence[Any], grid: CostGrid) -> Iterator[tuple[str, float, dict[str, Any]]]:
    tried = list(statics(traces, grid))
    for name, among in ((STATIC, [s for s in tried if s.min_confidence == 0]), (STOPPED, tried)):
        settings = min(among, key=lambda s: s.seconds)._asdict()
        yield name, settings.pop("seconds"), {"settings": settings}
    yield BY_EXIT, sum(clairvoyant(trace, grid, ("exit",)) for trace in traces), {}
    yield CLAIRVOYANT, sum(clairvoyant(trace, grid) for trace in traces), {}


def render(record: dict[str, Any]) -> str:
    """Tables per length: speedups by task at the first head cost, means by head cost, and ratios to the bounds."""
    config, parts = record["config"], list[str]()
    for task in record["tasks"]:
        name = (task["model"] or {}).get("model", "traces from a file")
        tokens = f"{task['num_prompts']} prompts, {task['num_tokens']} tokens"
        sampling = "sampled" if task["is_sampled"] else "greedy"
        start = ", from the statistics stored with it" if task["has_prior"] and config["prior"] == STORED else ""
        parts.append(f"{task['name']}: {name}, {task['num_layers']} layers, {tokens}, {sampling}{start}")
    for length in config["lengths"]:
        sections = [section for section in record["sections"] if section["length"] == length]
        parts += _length_tables(length, sections)
    return "\n\n".join(parts)


def _length_tables(length: int, sections: Sequence[dict[str, Any]]) -> Iterator[str]:
    heads = [section["head_layers"] for section in sections]
    names = list(sections[0]["rows"][0]["speedup"])
    figures = [[row["name"], *row["speedup"].values(), row["mean"]] for row in sections[0]["rows"]]
    title = f"{length} tokens, head: {heads[0]}; speedup over plain decoding in replay"
    yield f"{title}\n\n{_table(['', *names, 'mean'], figures)}"
    by_name = list(zip(*(section["rows"] for section in sections), strict=True))
    if len(sections) > 1:
        means = [[rows[0]["name"], *(row["mean"] for row in rows)] for rows in by_name]
        yield f"{length} tokens: mean over tasks by cost of the head, in layers\n\n{_table(['', *heads], means)}"
    bounds = [{row["name"]: row["mean"] for row in section["rows"]} for section in sections]
    shares = [
        [rows[0]["name"], *(_ratios(row["mean"], of) for row, of in zip(rows, bounds, strict=True))]
        for rows in by_name
        if rows[0]["kind"] == "policy"
    ]
    title = f"{length} tokens: the mean over that of the {STOPPED}, of the {BY_EXIT} and of the {CLAIRVOYANT}"
    yield f"{title}; by cost of the head, in layers\n\n{_table(['', *heads], shares)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return table(columns, [[f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row] for row in rows])


def _ratios(mean: float, bounds: dict[str, float]) -> str:
    return ", ".join(f"{mean / bounds[name]:.3f}" for name in (STOPPED, BY_EXIT, CLAIRVOYANT))


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ValueError, OSError, UnsupportedModelError: an option, file or model cannot be used.
    """
    parser = parser_of("replay", ReplayConfig, __doc__)
    parser.add_argument("--traces", nargs="+", default=[], metavar="FILE", help="replay these; nothing is decoded")
    parser.add_argument("--costs", metavar="FILE", help="JSON file of costs, instead of measuring them here")
    options = parser.parse_args(arguments)
    config = configured(ReplayConfig, options)

    def measure(say: Say, folder: Path | None) -> dict[str, Any]:
        tasks = gather(config, options.traces, options.costs, options.record_traces, say)
        sections = compare(tasks, config, say)
        if folder is not None:
            costs = {task.name: task.costs.as_dict() for task in tasks}
            (folder / "costs.json").write_text(json.dumps(costs) + "\n", "utf-8")
            plot_policies(max(sections, key=lambda s: s["length"])["rows"], folder / "policies.svg")
        return {"benchmark": "replay", "tasks": [task.as_dict() for task in tasks], "sections": sections}

    return run_command(options, config, measure, render)
