"""Every figure of a run, defined once.

Spec-Bench's three are computed as its `speed.py` (github.com/hemingkx/Spec-Bench, April 2025) does: rates are averaged
over questions, steps are pooled. The others add up before they divide. Times of one question are summed over its turns,
and hold its prefill unless a definition says otherwise. A figure is None where a method does not tell what it needs.

`METRICS` lists them by name with unit and definition; `figures` computes all of them for a group of questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.run.items import Item
from eval.run.turns import added_up
from selfspec.decoding.stats import SpecStats

INTERVAL = 0.95
METRICS: dict[str, tuple[str, str]] = {
    "num_questions": ("", "questions answered"),
    "num_tokens": ("", "new tokens, ends of text included"),
    "seconds": ("s", "wall time of all calls, prefill included"),
    "mean_accepted_tokens": ("", "Spec-Bench: mean of accept_lengths, pooled over all steps of all questions"),
    "spec_bench_tokens_per_second": ("1/s", "Spec-Bench: mean over questions of new tokens / wall time"),
    "spec_bench_speedup": ("x", "Spec-Bench: that mean over the baseline's, both by their own token counts"),
    "spec_bench_script_speedup": (
        "x",
        "what its script prints: the baseline's tokens counted again from its text, less one per turn",
    ),
    "tokens_per_second": ("1/s", "all new tokens / all seconds; interval over questions"),
    "decode_tokens_per_second": ("1/s", "tokens after each turn's first step / the time after it: prefill apart"),
    "prefill_share": ("", "share of the seconds that went into reading prompts"),
    "speedup": ("x", "tokens_per_second over the baseline's on the questions both answered; interval over questions"),
    "paired_ratio": (
        "x",
        "geometric mean over questions of speed / the baseline's speed on the same one; median and range beside it",
    ),
    "time_to_first_token_p50": ("s", "median over turns of the time to the end of the first step"),
    "time_to_first_token_p95": ("s", "95th percentile of the same"),
    "per_token_latency_p50": (
        "s",
        "median over tokens after a turn's first step; a token's latency is its step's time / the step's tokens; "
        "of our rounds that come at once, each has its own share of the time",
    ),
    "per_token_latency_p95": ("s", "95th percentile of the same"),
    "acceptance_length": ("", "1 + accepted / steps that drafted, pooled; counts the target's own token"),
    "draft_acceptance_rate": ("", "accepted drafted tokens / drafted tokens"),
    "acceptance_by_position": (
        "",
        "joint: steps that accepted at least i / that drafted at least i; conditional: / that also accepted i - 1",
    ),
    "layer_passes_per_token": ("", "layers run one after another per new token, prefill apart; plain: all layers"),
    "stage_shares": ("", "share of a round's time by stage, as the engine's own clock has it"),
}


@dataclass(frozen=True)
class Group:
    """A method's questions, and the baseline's of the same category.

    Args:
        base: None where no baseline is known.
        resamples, seed: of the bootstrap (percentile intervals of 95 %, questions drawn with replacement). Methods with
            the same questions are resampled alike.
    """

    items: Sequence[Item]
    base: Sequence[Item] | None
    resamples: int = 2000
    seed: int = 0

    @cached_property
    def pairs(self) -> list[tuple[Item, Item]]:
        """The questions that both have answered."""
        theirs = {item.question_id: item for item in self.base or ()}
        return [(item, theirs[item.question_id]) for item in self.items if item.question_id in theirs]

    def interval(self, values: Callable[[NDArray[np.int64]], NDArray[np.float64]], num: int) -> dict[str, float]:
        """The range of a figure over resampled questions.

        Args:
            values: `[resamples, num]` indices of questions to the figure of every resample.
        """
        draws = np.random.default_rng([self.seed, num]).integers(num, size=(self.resamples, num))
        outside = (1 - INTERVAL) / 2
        low, high = np.quantile(values(draws), [outside, 1 - outside])
        return {"low": float(low), "high": float(high)}

    @property
    def steps(self) -> list[list[tuple[int, float]]] | None:
        """(tokens, seconds) of the steps of every turn."""
        if any(item.steps is None for item in self.items):
            return None
        return [turn for item in self.items for turn in item.steps or ()]

    @property
    def stats(self) -> SpecStats | None:
        known = [item.stats for item in self.items if item.stats is not None]
        return added_up(known) if len(known) == len(self.items) else None


def figures(group: Group) -> dict[str, Any]:
    """Every metric of a group of at least one question, by name: a number, a mapping, a list, or None."""
    items = group.items
    tokens, seconds = sum(item.num_tokens for item in items), sum(item.seconds for item in items)
    found = {
        "num_questions": len(items),
        "num_tokens": tokens,
        "seconds": seconds,
        **_spec_bench(group),
        "tokens_per_second": _tokens_per_second(items, group),
        "speedup": _speedup(group),
        "paired_ratio": _paired_ratio(group),
        **_times(group, seconds),
        **_drafts(group, tokens),
    }
    return {name: found[name] for name in METRICS}


def mean_accepted_tokens(items: Sequence[Item]) -> float | None:
    """Spec-Bench's: the mean of `accept_lengths` of all steps of all questions; None where no step is known."""
    lengths = [length for item in items for length in item.accept_lengths]
    return float(np.mean(lengths)) if lengths else None


def mean_speed(items: Sequence[Item]) -> float:
    """Spec-Bench's tokens per second: the unweighted mean over questions of new tokens / wall time."""
    return float(np.array([item.num_tokens / item.seconds for item in items]).mean())


def _spec_bench(group: Group) -> dict[str, Any]:
    own, base = mean_speed(group.items), group.base or []
    again = [item.retokenised / item.seconds for item in base if item.retokenised is not None]
    scripts = float(np.array(again).mean()) if again and len(again) == len(base) else 0.0
    theirs = mean_speed(base) if base else 0.0
    return {
        "mean_accepted_tokens": mean_accepted_tokens(group.items),
        "spec_bench_tokens_per_second": own,
        "spec_bench_speedup": own / theirs if theirs else None,
        "spec_bench_script_speedup": own / scripts if scripts else None,
    }


def _columns(items: Sequence[Item]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.array([float(item.num_tokens) for item in items]), np.array([item.seconds for item in items])


def _tokens_per_second(items: Sequence[Item], group: Group) -> dict[str, float]:
    tokens, seconds = _columns(items)
    spread = group.interval(lambda draws: tokens[draws].sum(1) / seconds[draws].sum(1), len(items))
    return {"value": float(tokens.sum() / seconds.sum()), **spread}


def _speedup(group: Group) -> dict[str, float] | None:
    (tokens, seconds), (base, taken) = (_columns([pair[i] for pair in group.pairs]) for i in (0, 1))
    if not base.size or not base.all():  # an empty answer has no speed to be compared with
        return None

    def ratios(draws: NDArray[np.int64]) -> NDArray[np.float64]:
        own, theirs = tokens[draws].sum(1) / seconds[draws].sum(1), base[draws].sum(1) / taken[draws].sum(1)
        return np.asarray(own / theirs)

    value = tokens.sum() / seconds.sum() * taken.sum() / base.sum()
    return {"value": float(value), **group.interval(ratios, len(base)), "num_questions": len(base)}


def _paired_ratio(group: Group) -> dict[str, float] | None:
    ratios = np.array([a.speed / b.speed for a, b in group.pairs if a.num_tokens and b.num_tokens])
    if not ratios.size:
        return None
    logs = np.log(ratios)
    spread = group.interval(lambda draws: np.exp(logs[draws].mean(1)), len(ratios))
    ends = {"median": float(np.median(ratios)), "least": float(ratios.min()), "most": float(ratios.max())}
    return {"value": float(np.exp(logs.mean())), **spread, **ends, "num_questions": len(ratios)}


def _times(group: Group, seconds: float) -> dict[str, Any]:
    prefills = [item.prefill_seconds for item in group.items if item.prefill_seconds is not None]
    found: dict[str, Any] = {name: None for name in METRICS if name.endswith(("_p50", "_p95"))}
    found["prefill_share"] = sum(prefills) / seconds if len(prefills) == len(group.items) else None
    found["decode_tokens_per_second"] = None
    turns = group.steps
    if not turns:
        return found
    first = [turn[0][1] for turn in turns]
    later = [step for turn in turns for step in turn[1:] if step[0]]
    latencies = np.repeat([s / n for n, s in later], [n for n, _ in later])
    for name, values in (("time_to_first_token", first), ("per_token_latency", latencies)):
        for percent in (50, 95) if len(values) else ():
            found[f"{name}_p{percent}"] = float(np.percentile(values, percent))
    rest = sum(s for _, s in later)
    found["decode_tokens_per_second"] = sum(n for n, _ in later) / rest if rest else None
    return found


def _drafts(group: Group, tokens: int) -> dict[str, Any]:
    stats, passes = group.stats, [item.layer_passes for item in group.items if item.layer_passes is not None]
    stages = [item.stage_seconds for item in group.items if item.stage_seconds is not None]
    drafted = stats is not None and stats.num_draft_tokens > 0
    total = sum(sum(each.values()) for each in stages)
    return {
        "acceptance_length": stats.mean_acceptance_length if stats else None,
        "draft_acceptance_rate": stats.draft_acceptance_rate if stats and drafted else None,
        "acceptance_by_position": [
            {"joint": joint, "conditional": conditional} for joint, conditional in stats.acceptance_by_position()
        ]
        if stats and drafted
        else None,
        "layer_passes_per_token": sum(passes) / tokens if tokens and len(passes) == len(group.items) else None,
        "stage_shares": {name: sum(each[name] for each in stages) / total for name in stages[0]}
        if total and len(stages) == len(group.items)
        else None,
    }
