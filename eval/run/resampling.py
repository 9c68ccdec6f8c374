"""A run folder read back, and figures of questions drawn again: what comparisons of runs need."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from eval.run.items import Item, item_of
from eval.run.lines import Row, read_lines
from eval.run.metrics import Group
from eval.run.records import answers_path, unique
from eval.run.summary import fastest_plain
from selfspec.decoding.stats import SpecStats

Draws = NDArray[np.int64]  # [resamples, questions] indices of questions
Values = Callable[[Draws], NDArray[np.float64]]  # to a figure of every resample
Sums = Callable[[Item], tuple[float, float]]  # what a question adds to the two sums that a figure is the ratio of

SUMS: dict[str, Sums] = {
    "seconds": lambda item: (item.seconds, 1),
    "mean_accepted_tokens": lambda item: (sum(item.accept_lengths), len(item.accept_lengths)),
    "spec_bench_tokens_per_second": lambda item: (item.speed, 1),
    "tokens_per_second": lambda item: (item.num_tokens, item.seconds),
    "decode_tokens_per_second": lambda item: _added(step for turn in item.steps or () for step in turn[1:] if step[0]),
    "acceptance_length": lambda item: _lengths(item.stats or SpecStats()),
    "draft_acceptance_rate": lambda item: _hits(item.stats or SpecStats()),
    "layer_passes_per_token": lambda item: (item.layer_passes or 0, item.num_tokens),
}
OVER: dict[str, tuple[Sums, Sums]] = {  # a method's, and the baseline's that they are over
    "speedup": (SUMS["tokens_per_second"], SUMS["tokens_per_second"]),
    "spec_bench_speedup": (SUMS["spec_bench_tokens_per_second"], SUMS["spec_bench_tokens_per_second"]),
    "spec_bench_script_speedup": (
        SUMS["spec_bench_tokens_per_second"],
        lambda item: ((item.retokenised or 0) / item.seconds, 1),
    ),
}


def resampled(metric: str, group: Group) -> Values:
    """A figure of a group, over questions that are drawn from it: all of them once give that of `figures`."""
    if metric in SUMS:
        return _ratio(map(SUMS[metric], group.items))
    if metric in OVER:
        own, theirs = (_ratio(sums(pair[i]) for pair in group.pairs) for i, sums in enumerate(OVER[metric]))
        return lambda draws: own(draws) / theirs(draws)
    if metric == "paired_ratio":
        pairs = group.pairs
        mean = _ratio((log(a.speed / b.speed), 1.0) if a.num_tokens and b.num_tokens else (0.0, 0.0) for a, b in pairs)
        return lambda draws: np.exp(mean(draws))
    return _percentile(metric, group.items)


def _ratio(sums: Iterable[tuple[float, float]]) -> Values:
    top, bottom = np.array(list(sums), dtype=float).T
    return lambda draws: top[draws].sum(1) / bottom[draws].sum(1)


def _percentile(metric: str, items: Sequence[Item]) -> Values:
    """As of values that are written down as often as they count, which a resample's thousands need not be."""
    turns = [(i, turn) for i, item in enumerate(items) for turn in item.steps or ()]
    if metric.startswith("time_to_first_token"):
        rows = [(turn[0][1], 1, i) for i, turn in turns]
    else:
        rows = [(seconds / num, num, i) for i, turn in turns for num, seconds in turn[1:] if num]
    values, weights, owners = np.array(sorted(rows)).T
    share, owners = int(metric[-2:]) / 100, owners.astype(int)

    def of(draw: Draws) -> float:
        places = np.cumsum(weights * np.bincount(draw, minlength=len(items))[owners])
        if not places[-1]:
            return float("nan")
        at = share * (places[-1] - 1)
        low, high = (values[np.searchsorted(places, place, side="right")] for place in (floor(at), ceil(at)))
        return float(low + (high - low) * (at - floor(at)))

    return lambda draws: np.array([of(draw) for draw in draws])


def _added(steps: Iterable[tuple[int, float]]) -> tuple[float, float]:
    found = list(steps)
    return sum(num for num, _ in found), sum(seconds for _, seconds in found)


def _lengths(stats: SpecStats) -> tuple[float, float]:
    return stats.num_accepted_draft_tokens + stats.num_spec_steps, stats.num_spec_steps


def _hits(stats: SpecStats) -> tuple[float, float]:
    return stats.num_accepted_draft_tokens, stats.num_draft_tokens


class Opened(NamedTuple):
    """A run folder's content; `items` holds the figures of `answers`."""

    path: str
    settings: Row
    about: Row
    is_complete: bool
    baseline: str | None
    answers: dict[str, dict[Any, Row]]
    items: dict[str, dict[Any, Item]]


def open_run(path: Path, baseline: str | None = None) -> Opened:
    """Read a run folder, finished or not.

    Args:
        baseline: the method that speedups are over; None: the run's own.

    Raises:
        ValueError: it is no run folder.
    """
    try:
        settings = yaml.safe_load((path / "config.yaml").read_text("utf-8"))
        names = list(settings["methods"])
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError) as problem:
        hint = "name one that `python -m eval run` has written"
        raise ValueError(f"{str(path)!r} is no run folder ({problem}); {hint}") from problem
    about, summary = _json(path / "environment.json"), _json(path / "summary.json")
    answers = {name: unique(read_lines(answers_path(path, name))) for name in names}
    items = {name: {key: item_of(row) for key, row in rows.items()} for name, rows in answers.items()}
    own = summary.get("baseline") or settings.get("baseline")
    base = baseline or (own if own in names else fastest_plain(answers))
    return Opened(str(path), settings, about, summary.get("complete", False), base, answers, items)


def _json(path: Path) -> Row:
    try:
        content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (OSError, ValueError) as problem:
        raise ValueError(f"cannot read {path}: {problem}") from problem
    return content if isinstance(content, dict) else {}
