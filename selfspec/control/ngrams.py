"""Drafts by lookup: how often what followed a match comes again, and the draft lengths that this is worth.

Both are by the length of the match.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from selfspec.control.decay import Decayed, Floats, Passed
from selfspec.control.plan import MATCH_EDGES, NUM_MATCH_BINS, LookupTable, match_bin
from selfspec.control.round_costs import MOST_FOUND, MOST_PACKED, RoundCosts
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
TYPICAL = 8  # drafted tokens per row around which one more token is priced
# [bins, MOST_FOUND]: every further token of a draft follows a longer match.
_BINS = np.array([[match_bin(match + at) for at in range(MOST_FOUND)] for match in SHORTEST])


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


def table(
    rates: Sequence[Sequence[float]], costs: RoundCosts, usual: float, trust: float, most: int = MOST_FOUND
) -> LookupTable | None:
    """The drafts of all rows; None where no draft promises more than is usual.

    Args:
        rates: per row and bin, how likely the token that followed a match is to come again.
        usual: tokens per second of all rows without lookup.
        trust: by what forecasts of drafts by lookup are multiplied.
        most: longest draft of a row.
    """
    count, seconds = len(rates), np.array(costs.lookups())
    needs = usual * seconds / trust - count
    if not (needs < np.arange(len(needs))).any():
        return None  # not even if every draft were right
    chances = np.cumprod(np.array(rates)[:, _BINS], 2)  # [rows, bins, MOST_FOUND]: right as far as each token
    lengths, gains = (
        _single(chances, seconds, needs, most) if count == 1 else _shared(chances, seconds, usual / trust, most)
    )
    if not lengths.any():
        return None
    return LookupTable(tuple(map(tuple, lengths.tolist())), tuple(map(tuple, gains.tolist())), tuple(needs.tolist()))


def _single(chances: Floats, seconds: Floats, needs: Floats, most: int) -> tuple[Floats, Floats]:
    """The length of most tokens per second, where that is more than is usual."""
    most = min(most, len(seconds) - 1)
    gained = np.cumsum(np.where(chances < LEAST_CHANCE, 0.0, chances)[:, :, :most], 2)
    best = ((1 + gained) / seconds[1 : most + 1]).argmax(2)
    gains = np.take_along_axis(gained, best[:, :, None], 2)[:, :, 0]
    pays = gains >= needs[best + 1]
    return np.where(pays, best + 1, 0), np.where(pays, gains, 0.0)


def _shared(chances: Floats, seconds: Floats, usual: float, most: int) -> tuple[Floats, Floats]:
    """Every token that is as likely to be right as is worth its own time; the round is paid for by all rows."""
    count = len(chances)
    typical = min(TYPICAL * count, len(seconds) - 1)
    each = usual * (seconds[typical] - seconds[1]) / max(1, typical - 1)
    chances = chances[:, :, : min(most, MOST_PACKED // count)]
    kept = chances >= max(LEAST_CHANCE, each)
    return kept.sum(2), (chances * kept).sum(2)
