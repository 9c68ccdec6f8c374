"""Acceptance rates of drafts by lookup, by source and match length, and the draft lengths with the best speed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from selfspec.control.acceptance import Decayed, Floats, TokenClock
from selfspec.control.drafters import MOST_FOUND
from selfspec.control.plan import MATCH_EDGES, NUM_LOOKUP_BINS, SOURCES, LookupTable, lookup_bin
from selfspec.control.times import MOST_PACKED

if TYPE_CHECKING:
    from selfspec.drafting.ngram_index import Tally

SHORTEST = (1, *MATCH_EDGES)  # the shortest match length of each bin
PRIOR = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.99, 0.99)  # acceptance rate by match bin without observations
PRIOR_WEIGHT = 8.0  # pseudo-observations of the prior
ROW_WEIGHT = 6.0  # pseudo-observations of the rates of all rows, for a single row
HALF_LIFE, ROW_HALF_LIFE = 200.0, 60.0  # of all rows' and of one row's counts, in emitted tokens per row
MOST_OF_PROMPT = 16.0  # largest number of observations that a prompt counts as
_PRIOR = np.array(PRIOR * len(SOURCES))
_SHAPE = 2, NUM_LOOKUP_BINS  # hits, seen
_NOTHING = np.zeros(_SHAPE)
LEAST_CHANCE = 0.05  # tokens with a lower acceptance probability are not drafted
TYPICAL = 8  # drafted tokens per row at which the cost of one more token is taken
# [NUM_LOOKUP_BINS, MOST_FOUND]: the match before each further token of a draft is one token longer.
_BINS = np.array(
    [[lookup_bin(match + at, source) for at in range(MOST_FOUND)] for source in SOURCES for match in SHORTEST]
)


class NgramStats:
    """Decayed hits and observations by source and bin of match length, of all rows and of each row.

    The rates of one row are shrunk towards those of all rows.
    """

    def __init__(self, passed: TokenClock) -> None:
        self._clock = passed
        self._pooled = Decayed(_SHAPE, HALF_LIFE, passed)
        self._rows: dict[int, Decayed] = {}
        self._with_prompt: set[int] = set()  # rows whose prompt was counted

    def keep_rows(self, rows: Collection[int]) -> None:
        """Drop the counts of all rows but these."""
        if len(self._rows) > len(rows):
            self._rows = {row: self._rows[row] for row in rows if row in self._rows}
            self._with_prompt &= {*rows}

    def take(self, tally: Tally, seq_id: int) -> None:
        """Add a row's tally of its own text. The first one is its prompt: at most `MOST_OF_PROMPT` observations."""
        is_prompt = seq_id not in self._with_prompt
        self._with_prompt.add(seq_id)
        share = min(1.0, MOST_OF_PROMPT / max(1, tally.num_tokens)) if is_prompt else 1.0
        own = self._own(seq_id)
        for at, (right, seen) in enumerate(zip(tally.right, tally.seen, strict=True)):
            if seen:
                self._count(own, at, share * right, share * seen)

    def add(self, match: int, num_drafted: int, num_right: int, seq_id: int, source: int) -> None:
        """Count the accepted tokens of a draft and its first rejected one, each after a match one token longer."""
        own = self._own(seq_id)
        for place in range(min(num_right + 1, num_drafted)):
            self._count(own, lookup_bin(match + place, source), place < num_right, 1.0)

    def _own(self, seq_id: int) -> Decayed:
        if seq_id not in self._rows:
            self._rows[seq_id] = Decayed(_SHAPE, ROW_HALF_LIFE, self._clock)
        return self._rows[seq_id]

    def _count(self, own: Decayed, at: int, right: float, seen: float) -> None:
        for counts in (self._pooled, own):
            counts.add(at, right)
            counts.add(at + NUM_LOOKUP_BINS, seen)

    def rates(self, rows: Sequence[int]) -> Floats:
        """`[rows + 1, bins]`: the probability that the token after a match is the one that the text has.

        The last line is that of a row without observations.
        """
        hits, seen = self._pooled.now()
        usual = (hits + PRIOR_WEIGHT * _PRIOR) / (seen + PRIOR_WEIGHT)
        own = np.array([self._rows[row].now() if row in self._rows else _NOTHING for row in (*rows, -1)])
        return np.asarray((own[:, 0] + ROW_WEIGHT * usual) / (own[:, 1] + ROW_WEIGHT))


def table(rates: Floats, count: int, seconds: Floats, usual: float, most: int = MOST_FOUND) -> LookupTable | None:
    """Draft lengths in rounds of `count` rows; None where none is expected to be faster than decoding without lookup.

    Args:
        rates: `[rows, bins]`: the probability that the token after a match is the one that the text has.
        seconds: of rounds in which all rows together draft 0, 1, 2, .. tokens.
        usual: tokens per second of all rows without lookup.
        most: maximum draft length of a row.
    """
    if most < 1:
        return None
    needs = usual * seconds - count
    if not (needs < np.arange(len(needs))).any():
        return None  # slower even if every draft were accepted
    chances: Floats = np.multiply.accumulate(
        rates[:, _BINS], 2
    )  # [rows, bins, MOST_FOUND]: all tokens so far are accepted
    shared = min(most, MOST_PACKED // count)  # the ledger cuts what all rows draft
    lengths, gains = (
        _single(chances, seconds, needs, most) if count == 1 else _shared(chances, count, seconds, usual, shared)
    )
    if not lengths.any():
        return None
    return LookupTable(tuple(map(tuple, lengths.tolist())), tuple(map(tuple, gains.tolist())), tuple(needs.tolist()))


def _single(chances: Floats, seconds: Floats, needs: Floats, most: int) -> tuple[Floats, Floats]:
    """For one row: the length with the most tokens per second, or 0 where no length reaches `needs`."""
    most = min(most, len(seconds) - 1)
    gained = np.cumsum(np.where(chances < LEAST_CHANCE, 0.0, chances)[:, :, :most], 2)
    best = ((1 + gained) / seconds[1 : most + 1]).argmax(2)
    gains = np.take_along_axis(gained, best[:, :, None], 2)[:, :, 0]
    pays = gains >= needs[best + 1]
    return np.where(pays, best + 1, 0), np.where(pays, gains, 0.0)


def _shared(chances: Floats, count: int, seconds: Floats, usual: float, most: int) -> tuple[Floats, Floats]:
    """For several rows: every token whose acceptance probability is worth the time of one more token.

    Whether all drafts together are worth their round is decided by `LookupTable.drafted`.
    """
    typical = min(TYPICAL * count, len(seconds) - 1)
    each = usual * (seconds[typical] - seconds[1]) / max(1, typical - 1)
    chances = chances[:, :, :most]
    kept = chances >= max(LEAST_CHANCE, each)
    return kept.sum(2), (chances * kept).sum(2)
