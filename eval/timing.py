"""Clocks for comparisons: methods take turns, so that what drifts meanwhile (clock speed, other programs) meets all."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch
from scipy.stats import quantile_test

Result = TypeVar("Result")
Say = Callable[[str], None]  # progress, for people


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was asked for; a clock read before that measures launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """The call's result and the seconds it took."""
    synchronize(device)
    start = perf_counter()
    result = call()
    synchronize(device)
    return result, perf_counter() - start


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside: one method would pay for another's garbage."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def rotated(methods: Sequence[Result], by: int) -> list[Result]:
    by %= len(methods)
    return [*methods[by:], *methods[:by]]


class Spread(NamedTuple):
    """A median, the range of the values, how many there are, and an interval for the true median."""

    median: float
    low: float
    high: float
    num_values: int
    ci_low: float  # between these the true median lies with 95 %; of fewer than six values: their range
    ci_high: float


def spread(values: Iterable[float]) -> Spread:
    """Of at least one value. The interval is exact whatever the values' distribution (a binomial test on ranks)."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    sure = quantile_test(ordered, p=0.5).confidence_interval(0.95)
    bounds = (low, high) if sure.low != sure.low else (float(sure.low), float(sure.high))  # NaN: too few values
    return Spread(statistics.median(ordered), low, high, len(ordered), *bounds)
