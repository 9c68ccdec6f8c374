"""From timed calls to figures: medians with their spread, ratios paired within a repeat, and equality of outputs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from eval.methods import Answer
from eval.timing import Sample
from selfspec.decoding.stats import SpecStats

OUTSIDE = 40  # one in so many on either side of an interval: it is 95 % sure


class Spread(NamedTuple):
    """A median, the quartiles and the range around it, of how many values; and between which bounds it lies surely."""

    median: float
    low: float
    lower_quartile: float
    upper_quartile: float
    high: float
    num_values: int
    sure_low: float
    sure_high: float


def spread(values: Iterable[float]) -> Spread:
    """Median, inclusive quartiles, range, and confidence interval of the median, of at least one value."""
    ordered = sorted(values)
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    skipped = _outside(len(ordered))
    between = ordered[skipped], ordered[-1 - skipped]
    return Spread(quartiles[1], ordered[0], quartiles[0], quartiles[2], ordered[-1], len(ordered), *between)


def _outside(count: int) -> int:
    """How many of so many ordered values lie below an interval that is 95 % sure to hold the true median, or surer.

    Whatever they are distributed like, each lies below that with probability 1/2. Of fewer than six values even the
    whole range is less sure.
    """
    below, ways = 0, 1  # of 2**count: that no more than so many lie there
    while OUTSIDE * ways <= 2**count:
        below += 1
        ways += math.comb(count, below)
    return max(0, below - 1)


def of_method(samples: Iterable[Sample], name: str) -> list[Sample]:
    return [sample for sample in samples if sample.method == name]


def seconds_by_repeat(samples: Iterable[Sample]) -> list[float]:
    """Total seconds of every repeat, in order."""
    totals: dict[int, float] = defaultdict(float)
    for sample in samples:
        totals[sample.repeat] += sample.seconds
    return [totals[repeat] for repeat in sorted(totals)]


def seconds_by_item(samples: Iterable[Sample]) -> list[float]:
    """Median seconds of every item over the repeats, in order."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        seconds[sample.item].append(sample.seconds)
    return [statistics.median(seconds[item]) for item in sorted(seconds)]


def num_tokens(samples: Sequence[Sample]) -> int:
    """New tokens of one repeat."""
    first = min(sample.repeat for sample in samples)
    return sum(sample.num_tokens for sample in samples if sample.repeat == first)


def tokens_per_second(samples: Sequence[Sample]) -> float:
    """All tokens over all seconds, an item's seconds being the median over its repeats."""
    return num_tokens(samples) / sum(seconds_by_item(samples))


def paired_ratio(samples: Sequence[Sample], name: str, base: str) -> Spread:
    """How many times faster `name` is than `base`: seconds over seconds within each repeat, so that drift cancels."""
    ours, theirs = (seconds_by_repeat(of_method(samples, each)) for each in (name, base))
    return spread(b / a for a, b in zip(ours, theirs, strict=True))


def stats_of(samples: Iterable[Sample]) -> SpecStats | None:
    """The counts of one repeat's requests together; None where a method does not count."""
    first = [sample for sample in samples if sample.repeat == 0]
    known = [answer.stats for sample in first for answer in sample.answers if answer.stats is not None]
    return sum(known, SpecStats()) if known else None


class Difference(NamedTuple):
    """Where a method's output first leaves the reference."""

    prompt: int
    position: int  # index among the new tokens


def differences(samples: Iterable[Sample], reference: Sequence[Sequence[int]]) -> list[Difference]:
    """Prompts whose output, in any repeat, is not the reference's token for token.

    Args:
        reference: tokens per prompt. A batch's item 0 holds all prompts; otherwise an item is a prompt.
    """
    found: dict[int, int] = {}
    for sample in samples:
        for i, answer in enumerate(sample.answers):
            prompt = sample.item + i
            at = first_difference(answer, reference[prompt])
            if at is not None:
                found[prompt] = min(at, found.get(prompt, at))
    return [Difference(*pair) for pair in sorted(found.items())]


def first_difference(answer: Answer, wanted: Sequence[int]) -> int | None:
    """Index of the first token that differs; a missing or surplus token differs too."""
    same = zip(answer.tokens, wanted, strict=False)
    unequal = next((i for i, (a, b) in enumerate(same) if a != b), None)
    if unequal is None and len(answer.tokens) != len(wanted):
        return min(len(answer.tokens), len(wanted))
    return unequal
