"""Compare policies by replay: each on every task, at every length and head cost, beside what could have been."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from eval.bounds import MOST_ACCEPTED, Static, clairvoyant, plain_seconds, statics
from eval.config import MEASURED, STORED, ReplayConfig
from eval.replay import Replayed, make, replay
from eval.round_costs import CostGrid
from eval.sources import CHAIN, WITH_SOURCES, split_policy
from eval.tasks import Recorded
from eval.timing import Say
from eval.traces import Trace
from selfspec.control.adaptive import Adaptive
from selfspec.control.cost_table import Table
from selfspec.control.costs import Costs
from selfspec.control.registry import CHOOSES_EXIT, POLICIES

STATIC, STOPPED, CLAIRVOYANT = "best static (E, D)", "best static (E, D, stop)", "clairvoyant"
BY_EXIT = "clairvoyant without lookup"
BESIDE_CHAIN = (CHAIN, WITH_SOURCES)  # policies to compare where nothing can be looked up
KEEPS_PRIOR = ("adaptive",)  # policies that can begin with what was seen before
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


def compare(tasks: Sequence[Recorded], config: ReplayConfig, say: Say) -> list[dict[str, Any]]:
    """One section per length and head cost; a row per policy and bound, with its speedup over plain by task."""
    sections = []
    for length in config.lengths:
        for head in config.head_layers:
            say(f"{length} tokens, head: {head if head == MEASURED else f'{head:g} layers'}")
            columns = [_column(task, length, head, config) for task in tasks]
            rows = [_row(same, tasks) for same in zip(*columns, strict=True)]
            sections.append({"length": length, "head_layers": head, "rows": rows})
    return sections


class Cell(NamedTuple):
    """What a policy or bound comes to in one task."""

    name: str
    kind: str
    start: str | None
    speedup: float
    figures: dict[str, Any]


def _row(cells: Sequence[Cell], tasks: Sequence[Recorded]) -> dict[str, Any]:
    """A policy or bound over all tasks."""
    names = [task.name for task in tasks]
    return {
        "name": cells[0].name,
        "kind": cells[0].kind,
        "start": cells[0].start,
        "speedup": {name: cell.speedup for name, cell in zip(names, cells, strict=True)},
        "mean": fmean(cell.speedup for cell in cells),
        "tasks": {name: cell.figures for name, cell in zip(names, cells, strict=True)},
    }


def _column(task: Recorded, length: int, head: str | float, config: ReplayConfig) -> list[Cell]:
    """One task's cells from top to bottom."""
    traces = [trace.cut(length) for trace in task.traces]
    costs = task.costs if isinstance(head, str) else with_head(task.costs, head)
    of_rounds = CostGrid(costs, MOST_ACCEPTED)
    plain = plain_seconds(traces, of_rounds)
    prior = task.prior if config.prior == STORED else None
    cells = []
    for start in config.starts:
        for name in config.policies or (POLICIES if config.renumbered == "no" else BESIDE_CHAIN):
            if start != config.starts[0] and split_policy(name)[0] not in KEEPS_PRIOR:
                continue  # one start is as the other
            done = list(play(name, traces, costs, start == "warm", *_told(name, task, config), prior))
            summary = _summary(done)
            cells.append(Cell(name, "policy", start, plain / summary["seconds"], summary))
    for name, seconds, settings in _bounds(traces, of_rounds):
        cells.append(Cell(name, "bound", None, plain / seconds, {"seconds": seconds, **settings}))
    return cells


def _told(name: str, task: Recorded, config: ReplayConfig) -> tuple[int | None, int | None]:
    """The exit layer and draft length for a policy that does not choose them itself."""
    if split_policy(name)[0] in CHOOSES_EXIT:
        return None, None
    return config.exit_layer or task.exit_layer, config.num_draft_tokens or task.num_draft_tokens


def play(
    name: str,
    traces: Sequence[Trace],
    costs: Costs,
    is_warm: bool = False,
    exit_layer: int | None = None,
    num_draft_tokens: int | None = None,
    prior: Any = None,
) -> Iterator[Replayed]:
    """Replay a new policy on each prompt; warm, one goes on from prompt to prompt, as it does in a process."""
    policy = None
    for trace in traces:
        if is_warm and isinstance(policy, Adaptive):
            policy.forget_rows()
        else:
            policy = make(name, costs, exit_layer, num_draft_tokens, prior)
        yield replay([trace], policy, costs)


def _summary(done: Sequence[Replayed]) -> dict[str, Any]:
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


def _bounds(traces: Sequence[Trace], costs: CostGrid) -> Iterator[tuple[str, float, dict[str, Any]]]:
    tried = list(statics(traces, costs))
    for name, among in ((STATIC, [s for s in tried if s.min_confidence == 0]), (STOPPED, tried)):
        best = min(among, key=lambda s: s.seconds)
        yield name, best.seconds, {"settings": _settings(best)}
    yield BY_EXIT, sum(clairvoyant(trace, costs, ("exit",)) for trace in traces), {}
    yield CLAIRVOYANT, sum(clairvoyant(trace, costs) for trace in traces), {}


def _settings(static: Static) -> dict[str, Any]:
    settings = static._asdict()
    del settings["seconds"]
    return settings
