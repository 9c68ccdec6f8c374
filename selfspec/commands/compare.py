"""Times drafting against plain decoding on the same request, in the same process, and compares their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from selfspec.commands.job import Job, Run

WARM_UP_TOKENS = 8
PAIRS = (2, 31)  # fewest and most timed runs of each: those of a small model take hundredths of a second
ENOUGH_SECONDS = 3.0  # no further pair is begun after this


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of every timed run, end to end, prompt included."""

    drafted_runs: list[float]
    plain_runs: list[float]
    first_difference: int | None  # index of the first token, over all rows, that plain decoding chose differently

    @property
    def drafted(self) -> float:
        return median(self.drafted_runs)

    @property
    def plain(self) -> float:
        return median(self.plain_runs)

    @property
    def speedup(self) -> float:
        return self.plain / self.drafted

    def as_dict(self) -> dict[str, object]:
        """Plain numbers for JSON."""
        return {
            "speedup": self.speedup,
            "tokens_identical": self.first_difference is None,
            "first_difference": self.first_difference,
            "drafted_seconds": self.drafted_runs,
            "plain_seconds": self.plain_runs,
        }


def compare(job: Job, shown: Run) -> Comparison:
    """Warm both up, then run them in turns, each first in every other pair, until medians mean something."""
    drafted: list[float] = []
    plain: list[float] = []
    pair = [(job.policy, drafted), ("plain", plain)]
    for policy, _ in pair:
        job.run(policy, max_new_tokens=WARM_UP_TOKENS)
    written = [shown.tokens]
    while len(plain) < PAIRS[0] or (len(plain) < PAIRS[1] and sum(drafted) + sum(plain) < ENOUGH_SECONDS):
        pair = pair[::-1]
        for policy, seconds in pair:
            done = job.run(policy)
            seconds.append(done.seconds)
            written.append(done.tokens)
    differences = [at for other in written[1:] if (at := first_difference(written[0], other)) is not None]
    return Comparison(drafted, plain, min(differences, default=None))


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Index of the first token in which two lists differ; None when they are equal."""
    if one == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
