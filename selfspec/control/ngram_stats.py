"""`NgramStats`: how often the token that followed a match comes again, by the length of the match."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from selfspec.control.decay import Decayed, Passed
from selfspec.control.plan import MATCH_EDGES, NUM_MATCH_BINS, match_bin
from selfspec.control.rows import Tally

SHORTEST = (1, *MATCH_EDGES)  # match of every bin
PRIOR = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.99, 0.99)  # by bin, before any token was seen
PRIOR_WEIGHT = 8.0  # observations that the prior is worth beside those of all rows
ROW_WEIGHT = 6.0  # and those of all rows beside a row's own
HALF_LIFE, ROW_HALF_LIFE = 200.0, 60.0  # emitted tokens per row after which an observation counts half
MOST_OF_PROMPT = 16.0  # tokens that a row's prompt counts for
_PRIOR = np.array(PRIOR)
_SHAPE = 2, NUM_MATCH_BINS  # hits, seen
LEAST_CHANCE = 0.05  # tokens less likely to be right are not drafted
MOST_FOUND = 63  # longest draft


class NgramStats:
    """Decayed hits and misses by bin of match length: of all rows, and of each row alone.

    A row's own counts correct those of all rows: one row repeats itself while another only seems to.
    """

    def __init__(self, passed: Passed) -> None:
        self._clock = passed
        self._pooled = Decayed(_SHAPE, HALF_LIFE, passed)
        self._rows: dict[int, Decayed] = {}

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

    def _own(self, request_id: int) -> Decayed:
        if request_id not in self._rows:
            self._rows[request_id] = Decayed(_SHAPE, ROW_HALF_LIFE, self._clock)
        return self._rows[request_id]

    def _count(self, own: Decayed, at: int, right: float, seen: float) -> None:
        for counts in (self._pooled, own):
            counts.add(at, right)
            counts.add(at + NUM_MATCH_BINS, seen)

    def rates(self, request_id: int) -> list[float]:
        """By bin: how likely the token that followed a match in this row is to come again."""
        hits, seen = self._pooled.now()
        rates = (hits + PRIOR_WEIGHT * _PRIOR) / (seen + PRIOR_WEIGHT)
        if request_id in self._rows:
            hits, seen = self._rows[request_id].now()
            rates = (hits + ROW_WEIGHT * rates) / (seen + ROW_WEIGHT)
        by_bin: list[float] = rates.tolist()
        return by_bin
