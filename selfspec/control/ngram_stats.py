"""`NgramStats`: how often the token that followed a match comes again, by the length of the match."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field

from selfspec.control.fading import Fading, Passed
from selfspec.control.plan import MATCH_EDGES, NUM_MATCH_BINS, match_bin
from selfspec.control.rows import Tally

SHORTEST = (1, *MATCH_EDGES)  # match of every bin
PRIOR = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.99, 0.99)  # by bin, before any token was seen
PRIOR_WEIGHT = 8.0  # observations that the prior is worth beside those of all rows
ROW_WEIGHT = 6.0  # and those of all rows beside a row's own
HALF_LIFE, ROW_HALF_LIFE = 200.0, 60.0  # emitted tokens per row after which an observation counts half
MOST_OF_PROMPT = 16.0  # tokens that a row's prompt counts for
LEAST_CHANCE = 0.05  # tokens less likely to be right are not drafted
MOST_FOUND = 63  # longest draft


@dataclass(slots=True)
class _Row:
    hits: array[float] = field(default_factory=lambda: array("d", bytes(8 * NUM_MATCH_BINS)))
    seen: array[float] = field(default_factory=lambda: array("d", bytes(8 * NUM_MATCH_BINS)))
    at: float = 0.0  # when they were last faded

    def fade(self, now: float) -> None:
        if now > self.at:
            share = 0.5 ** ((now - self.at) / ROW_HALF_LIFE)
            for counts in (self.hits, self.seen):
                counts[:] = array("d", [share * n for n in counts])
            self.at = now


class NgramStats(Fading):
    """Decayed hits and misses by bin of match length: of all rows, and of each row alone.

    A row's own counts correct those of all rows: one row repeats itself while another only seems to.
    """

    def __init__(self, passed: Passed) -> None:
        super().__init__(HALF_LIFE, passed)
        self._hits, self._seen = _zeros(), _zeros()
        self._rows: dict[int, _Row] = {}

    def _divide(self, by: float) -> None:
        for counts in (self._hits, self._seen):
            counts[:] = array("d", [count / by for count in counts])

    def keep_rows(self, rows: Collection[int]) -> None:
        """Forget all rows but these."""
        if len(self._rows) > len(rows):
            self._rows = {row: self._rows[row] for row in rows if row in self._rows}

    def take(self, tally: Tally, request_id: int) -> None:
        """Count what came in a row since its tally was last taken; its prompt, which comes first, as a few tokens."""
        is_prompt = request_id not in self._rows
        share = min(1.0, MOST_OF_PROMPT / max(1, tally.num_tokens)) if is_prompt else 1.0
        own = self._own(request_id)
        for at, (right, seen) in enumerate(zip(tally.right, tally.seen, strict=True)):
            if seen:
                self._count(own, at, share * right, share * seen)

    def add(self, match: int, num_drafted: int, num_right: int, request_id: int) -> None:
        """Count a draft's right tokens, and its first wrong one if it came to that; each follows a longer match."""
        own = self._own(request_id)
        for place in range(min(num_right + 1, num_drafted)):
            self._count(own, match_bin(match + place), place < num_right, 1.0)

    def _count(self, own: _Row, at: int, right: float, seen: float) -> None:
        self._hits[at] += self._weight * right
        self._seen[at] += self._weight * seen
        own.hits[at] += right
        own.seen[at] += seen

    def _own(self, request_id: int) -> _Row:
        self._fade()
        own = self._rows.get(request_id)
        if own is None:
            own = self._rows[request_id] = _Row(at=self.passed.tokens)
        own.fade(self.passed.tokens)
        return own

    def rates(self, request_id: int) -> list[float]:
        """By bin: how likely the token that followed a match in this row is to come again."""
        self._fade()
        prior, own = PRIOR_WEIGHT * self._weight, self._rows.get(request_id)
        pooled = [
            (hits + prior * first) / (seen + prior)
            for hits, seen, first in zip(self._hits, self._seen, PRIOR, strict=True)
        ]
        if own is None:
            return pooled
        own.fade(self.passed.tokens)
        return [
            (hits + ROW_WEIGHT * rate) / (seen + ROW_WEIGHT)
            for hits, seen, rate in zip(own.hits, own.seen, pooled, strict=True)
        ]


def _zeros() -> array[float]:
    return array("d", bytes(8 * NUM_MATCH_BINS))
