"""Loads of `python -m eval serve` (prompts, lengths, arrival times), and their figures as in `vllm bench serve`.

TTFT: seconds from sending a request to its first token. TPOT: those from the first token to the last, per token after
the first. ITL: those between two deliveries of tokens, of which one may hold several. E2EL: those of the whole request.
Goodput: requests per second that met every objective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isinf
from typing import Any, NamedTuple

import numpy as np

from train.configuration import check, check_known

PROMPT, LENGTH, ARRIVAL = range(3)  # streams of random numbers, so that no draw depends on another one's count
TIMES = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")  # figures of single requests, of which an objective may be
PERCENTILES = (50, 95, 99)


class Asked(NamedTuple):
    """A request of a load: a text or token ids to continue, and the number of tokens to write."""

    prompt: str | tuple[int, ...]
    num_output: int


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds at which `count` requests arrive; their mean rate is exactly `rate`, so no load is heavier by chance.

    Gaps have the Gamma distribution with shape `burstiness`, as in `vllm bench serve`: 1 is a Poisson process, and the
    coefficient of variation is 1 / sqrt(burstiness). Arrivals at different rates differ by a factor only.

    Args:
        rate: requests per second; infinite: all arrive at once.
    """
    if isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng((seed, ARRIVAL)).gamma(burstiness, 1 / burstiness, count)
    times = np.cumsum(gaps)
    times = (times - times[0]) * ((count - 1) / rate / max(times[-1] - times[0], 1e-12))
    return [float(at) for at in times]


def output_lengths(count: int, between: Sequence[int], seed: int = 0) -> list[int]:
    """Output lengths in tokens, uniform in `between`, both ends included."""
    low, high = between
    return [int(n) for n in np.random.default_rng((seed, LENGTH)).integers(low, high + 1, count)]


def random_prompts(count: int, between: Sequence[int], vocab_size: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random token ids; their number is uniform in `between`, both ends included."""
    draw, (low, high) = np.random.default_rng((seed, PROMPT)), between
    return [tuple(draw.integers(vocab_size, size=int(n)).tolist()) for n in draw.integers(low, high + 1, count)]


class Served(NamedTuple):
    """What came of a request; times are seconds since the load began."""

    sent: float
    deliveries: tuple[float, ...]  # when tokens came
    num_prompt: int
    num_output: int
    error: str = ""  # empty: it was completed

    @property
    def ttft(self) -> float:
        return self.deliveries[0] - self.sent

    @property
    def e2el(self) -> float:
        return self.deliveries[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """None where there is only one token."""
        return (self.e2el - self.ttft) / (self.num_output - 1) if self.num_output > 1 else None


class Goal(NamedTuple):
    """An objective: the most milliseconds of a figure, or with `is_multiple` the most times the reference's median."""

    name: str
    most: float
    is_multiple: bool


def parse_goals(given: Sequence[str]) -> list[Goal]:
    """Read objectives such as `ttft:500` (milliseconds) or `tpot:2x` (times the median of the idle reference).

    Raises:
        ValueError: one is written differently.
    """
    goals = []
    for text in given:
        name, _, most = text.partition(":")
        check_known("objective", name, GOALS)
        is_multiple = most.endswith("x")
        try:
            number = float(most.removesuffix("x"))
        except ValueError:
            number = 0.0
        check(0 < number < float("inf"), f"goodput: {name}", "milliseconds above 0, or a multiple such as 2x", most)
        goals.append(Goal(name, number, is_multiple))
    return goals


def figures_of(served: Sequence[Served]) -> dict[str, Any]:
    """All figures of a load but its goodput; times in milliseconds, None where no request was completed."""
    done = [one for one in served if not one.error]
    ends = [one.deliveries[-1] for one in done]
    duration = max(ends, default=0.0) - min((one.sent for one in served), default=0.0)
    found: dict[str, Any] = {"completed": len(done), "failed": len(served) - len(done), "duration": duration}
    prompts, outputs = sum(one.num_prompt for one in done), sum(one.num_output for one in done)
    found |= {"total_input_tokens": prompts, "total_output_tokens": outputs}
    per_second = {"request": len(done), "output": outputs, "total_token": prompts + outputs}
    found |= {f"{name}_throughput": _over(count, duration) for name, count in per_second.items()}
    gaps = [b - a for one in done for a, b in zip(one.deliveries, one.deliveries[1:], strict=False)]
    for name in TIMES:
        values = gaps if name == "itl" else [v for one in done if (v := getattr(one, name)) is not None]
        found[f"mean_{name}_ms"] = 1e3 * float(np.mean(values)) if values else None
        for percent in PERCENTILES:
            found[f"p{percent}_{name}_ms"] = 1e3 * float(np.percentile(values, percent)) if values else None
    return found


def _over(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def limits_of(goals: Sequence[Goal], reference: Mapping[str, Any]) -> dict[str, float]:
    """The most milliseconds by figure, of which multiples are of the medians among the figures `reference`."""
    return {g.name: g.most * (reference[f"p50_{g.name}_ms"] or 0.0) if g.is_multiple else g.most for g in goals}


def goodput(requests: Sequence[Mapping[str, Any]], duration: float, limits: Mapping[str, float]) -> float:
    """Completed requests per second within all limits.

    Args:
        requests: those of `as_rows`.
    """
    good = sum(not r["error"] and all((r[name] or 0.0) <= most for name, most in limits.items()) for r in requests)
    return _over(good, duration)


def as_rows(served: Sequence[Served]) -> list[dict[str, Any]]:
    """The figures of every request as plain values, times in milliseconds; None where a request failed."""
    rows = []
    for one in served:
        times = {name: None if one.error else getattr(one, name) for name in GOALS}
        milliseconds = {name: None if value is None else round(1e3 * value, 3) for name, value in times.items()}
        rows.append({"sent": round(one.sent, 4), **milliseconds, "num_output": one.num_output, "error": one.error})
    return rows
