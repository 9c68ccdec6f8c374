"""The definition of every figure of a run.

Spec-Bench's figures are computed as in its `speed.py` (github.com/hemingkx/Spec-Bench, April 2025): rates are averaged
over questions, steps are pooled. The other figures are ratios of sums. The time of a question is summed over its turns
and includes prefill unless a definition says otherwise. A figure is None where a method does not report its inputs.

Intervals of 95 % come from a percentile bootstrap over the questions (`scipy.stats.bootstrap`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eval.answers import Item
from selfspec.decoding.outputs import SpecStats

INTERVAL = 0.95
Terms = Callable[[Item], tuple[float, float]]  # a question's terms of numerator and denominator
Draws = NDArray[np.int64]  # [..., questions] indices of questions


class Metric(NamedTuple):
    """A figure's unit and definition; `terms` where it is a ratio of sums over questions."""

    unit: str
    meaning: str
    terms: Terms | None = None
    over_baseline: bool = False  # divided by the baseline's ratio


def _speed(item: Item) -> tuple[float, float]:
    return item.num_tokens, item.seconds


def _mean_speed(item: Item) -> tuple[float, float]:
    return item.speed, 1


def _after_first_steps(item: Item) -> tuple[float, float]:
    if item.steps is None:
        return float("nan"), float("nan")
    later = [step for turn in item.steps for step in turn[1:] if step[0]]
    return sum(tokens for tokens, _ in later), sum(seconds for _, seconds in later)


def _lengths(item: Item) -> tuple[float, float]:
    stats = item.stats or SpecStats()
    return stats.num_accepted_draft_tokens + stats.num_spec_steps, stats.num_spec_steps


def _hits(item: Item) -> tuple[float, float]:
    stats = item.stats or SpecStats()
    return stats.num_accepted_draft_tokens, stats.num_draft_tokens


METRICS = {
    "num_questions": Metric("", "questions answered"),
    "num_tokens": Metric("", "new tokens, ends of text included"),
    "seconds": Metric("s", "wall time of all calls, prefill included", lambda i: (i.seconds, 1)),
    "mean_accepted_tokens": Metric(
        "",
        "Spec-Bench: mean of accept_lengths, pooled over all steps of all questions",
        lambda i: (sum(i.accept_lengths), len(i.accept_lengths)),
    ),
    "spec_bench_tokens_per_second": Metric(
        "1/s", "Spec-Bench: mean over questions of new tokens / wall time", _mean_speed
    ),
    "spec_bench_speedup": Metric(
        "x", "Spec-Bench: that mean over the baseline's, each by its own token counts", _mean_speed, True
    ),
    "tokens_per_second": Metric("1/s", "all new tokens / all seconds; interval over questions", _speed),
    "decode_tokens_per_second": Metric(
        "1/s", "tokens after each turn's first step / the time after it: without prefill", _after_first_steps
    ),
    "prefill_share": Metric("", "share of the seconds spent on prefill"),
    "speedup": Metric(
        "x",
        "tokens_per_second over the baseline's on the questions both answered; interval over questions",
        _speed,
        True,
    ),
    "paired_ratio": Metric(
        "x", "geometric mean over questions of speed / the baseline's speed on the same one; with median and range"
    ),
    "time_to_first_token_p50": Metric("s", "median over turns of the time to the end of the first step"),
    "time_to_first_token_p95": Metric("s", "95th percentile of the same"),
    "per_token_latency_p50": Metric(
        "s",
        "median over tokens after a turn's first step; a token's latency is its step's time / the step's tokens; "
        "the time of a program of rounds is divided among its rounds",
    ),
    "per_token_latency_p95": Metric("s", "95th percentile of the same"),
    "acceptance_length": Metric(
        "", "1 + accepted / steps that drafted, pooled; counts the target's own token", _lengths
    ),
    "draft_acceptance_rate": Metric("", "accepted drafted tokens / drafted tokens", _hits),
    "acceptance_by_position": Metric(
        "", "joint: steps that accepted at least i / that drafted at least i; conditional: / that also accepted i - 1"
    ),
    "layer_passes_per_token": Metric(
        "",
        "layers run one after another per new token, without prefill; plain: all layers",
        lambda i: (float("nan") if i.layer_passes is None else i.layer_passes, i.num_tokens),
    ),
    "stage_shares": Metric("", "share of a round's time by stage, by the engine's own clock"),
}
TABLE = (  # the default columns of a report
    "tokens_per_second",
    "speedup",
    "paired_ratio",
    "mean_accepted_tokens",
    "draft_acceptance_rate",
    "time_to_first_token_p50",
    "per_token_latency_p50",
    "per_token_latency_p95",
)
WITH_INTERVAL = ("tokens_per_second", "speedup", "paired_ratio")
PERCENTILES = tuple(name for name in METRICS if name.endswith(("_p50", "_p95")))
OVER_BASELINE = (*(name for name, metric in METRICS.items() if metric.over_baseline), "paired_ratio")
COMPUTED = tuple(n for n, m in METRICS.items() if m.terms or n in OVER_BASELINE or n in PERCENTILES)


@dataclass(frozen=True)
class Group:
    """A method's answers in one category, and the baseline's (None: there is no baseline).

    Args:
        resamples, seed: of the bootstrap; methods with the same number of questions have the same resamples.
    """

    items: Sequence[Item]
    base: Sequence[Item] | None
    resamples: int = 2000
    seed: int = 0

    @cached_property
    def pairs(self) -> list[tuple[Item, Item]]:
        """Both answers to every question that method and baseline have answered."""
        theirs = {item.question_id: item for item in self.base or ()}
        return [(item, theirs[item.question_id]) for item in self.items if item.question_id in theirs]

    def interval(self, figure: Callable[[Draws], NDArray[np.float64]], num: int) -> dict[str, float]:
        """The 95 % interval of a figure over resampled questions.

        Args:
            figure: maps `[..., num]` indices of questions to the figure of each resample, or nan.
            num: number of questions.
        """
        if num == 1:  # all resamples are equal
            value = float(figure(np.zeros(1, dtype=np.int64)))
            return {"low": value, "high": value}
        from scipy.stats import bootstrap  # slow to import

        found = bootstrap(
            (np.arange(num),),
            lambda draws, axis: figure(draws),
            n_resamples=self.resamples,
            confidence_level=INTERVAL,
            method="percentile",
            vectorized=True,
            batch=500,
            rng=np.random.default_rng([self.seed, num]),
        ).confidence_interval
        return {"low": float(found.low), "high": float(found.high)}

    def stats(self) -> SpecStats | None:
        known = [item.stats for item in self.items if item.stats is not None]
        return sum(known, SpecStats()) if len(known) == len(self.items) else None


def drawn(name: str, group: Group) -> tuple[Callable[[Draws], NDArray[np.float64]], int]:
    """A figure of COMPUTED as a function of drawn questions (nan: unknown), and the number of questions."""
    metric = METRICS[name]
    if name == "paired_ratio":
        pairs = [(a, b) for a, b in group.pairs if a.num_tokens and b.num_tokens]
        mean = _ratio([(log(a.speed / b.speed), 1.0) for a, b in pairs])
        return lambda draws: np.exp(mean(draws)), len(pairs)
    if metric.over_baseline and metric.terms is not None:
        own, base = (_ratio([metric.terms(pair[i]) for pair in group.pairs]) for i in (0, 1))
        return lambda draws: np.asarray(own(draws) / base(draws)), len(group.pairs)
    if metric.terms is not None:
        return _ratio([metric.terms(item) for item in group.items]), len(group.items)
    return _percentile(name, group.items), len(group.items)


def _ratio(terms: Sequence[tuple[float, float]]) -> Callable[[Draws], NDArray[np.float64]]:
    top, bottom = np.array(terms, dtype=float).reshape(-1, 2).T
    return lambda draws: np.asarray(top[draws].sum(-1) / bottom[draws].sum(-1))


def _percentile(name: str, items: Sequence[Item]) -> Callable[[Draws], NDArray[np.float64]]:
    values = [_times(name, item) for item in items]
    share = int(name[-2:])

    def of(draw: Draws) -> float:
        chosen = np.concatenate([values[i] for i in draw])
        return float(np.percentile(chosen, share)) if chosen.size else float("nan")

    return lambda draws: np.apply_along_axis(of, -1, draws)


def _times(name: str, item: Item) -> NDArray[np.float64]:
    """A question's times to first token, one per turn, or its latencies of every later token."""
    turns = item.steps or []
    if name.startswith("time_to_first_token"):
        return np.array([turn[0][1] for turn in turns])
    later = [step for turn in turns for step in turn[1:] if step[0]]
    return np.repeat([seconds / num for num, seconds in later], [num for num, _ in later])


def value_of(name: str, group: Group) -> float | None:
    """A figure of COMPUTED; None where it is unknown."""
    figure, num = drawn(name, group)
    if not num:
        return None
    if name in PERCENTILES and any(item.steps is None for item in group.items):
        return None
    with np.errstate(all="ignore"):  # a division by zero is not a figure
        value = float(figure(np.arange(num)))
    return value if np.isfinite(value) else None


def figures(group: Group) -> dict[str, Any]:
    """Every metric of a group of at least one question, by name: a number, a mapping, a list, or None."""
    found: dict[str, Any] = {name: value_of(name, group) for name in COMPUTED}
    for name in WITH_INTERVAL:
        if found[name] is not None:
            figure, num = drawn(name, group)
            with np.errstate(all="ignore"):
                found[name] = {"value": found[name], **group.interval(figure, num)}
            if name != "tokens_per_second":
                found[name]["num_questions"] = num
    if found["paired_ratio"] is not None:
        ratios = np.array([a.speed / b.speed for a, b in group.pairs if a.num_tokens and b.num_tokens])
        found["paired_ratio"] |= {
            "median": float(np.median(ratios)),
            "least": float(ratios.min()),
            "most": float(ratios.max()),
        }
    found |= {
        "num_questions": len(group.items),
        "num_tokens": sum(item.num_tokens for item in group.items),
        "seconds": sum(item.seconds for item in group.items),
        **_shares(group),
    }
    return {name: found[name] for name in METRICS}


def _shares(group: Group) -> dict[str, Any]:
    """The shares of time, and the acceptance of drafts."""
    items, stats = group.items, group.stats()
    prefills = [item.prefill_seconds for item in items if item.prefill_seconds is not None]
    stages = [item.stage_seconds for item in items if item.stage_seconds is not None]
    total = sum(sum(each.values()) for each in stages)
    is_whole = len(stages) == len(items) and total > 0
    positions = stats.acceptance_by_position() if stats and stats.num_draft_tokens else None
    return {
        "prefill_share": sum(prefills) / sum(item.seconds for item in items) if len(prefills) == len(items) else None,
        "acceptance_by_position": positions and [{"joint": a, "conditional": b} for a, b in positions],
        "acceptance_length": stats.mean_acceptance_length if stats else None,
        "stage_shares": {name: sum(each[name] for each in stages) / total for name in stages[0]} if is_whole else None,
    }
