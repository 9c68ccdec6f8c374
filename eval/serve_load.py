"""Loads of `python -m eval serve`: prompts, output lengths and arrival times, the same for every policy."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from typing import NamedTuple

import numpy as np

PROMPT, LENGTH, ARRIVAL = range(3)  # streams of random numbers, so that no draw depends on another one's count


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
