"""`Matches`: how far drafts by lookup were right, by how long a match they followed, and what that makes them worth.

It costs nothing to learn: whatever a round emitted is set beside what lookup would have drafted, used or not.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from selfspec.control.fading import Fading, Passed
from selfspec.control.plan import MATCH_EDGES
from selfspec.control.rows import Looked, Tally

LONG = MATCH_EDGES[-1]  # from here on
FIRST = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # by bin: how often a token is right that nothing is known of
FIRST_WEIGHT, POOL_WEIGHT = 8.0, 6.0  # observations that is worth beside the pooled ones, and those beside a position's
ROW_WEIGHT = 6.0  # and all rows' observations beside a row's own
HALF_LIFE, ROW_HALF_LIFE = 200.0, 60.0  # tokens after which an observation counts half, of all rows and of a row's own
LEAST = 0.05  # tokens less likely than this to be right are not drafted
MOST_OF_PROMPT = 16  # tokens that a row's prompt counts for
MOST_FOUND = 63  # longest draft considered: longer than those of an exit, since drafting takes no time
_POOLS = [bisect_right(MATCH_EDGES, match) for match in range(MATCH_EDGES[-1] + 1)]  # by match; longer ones: the last


class Choice(NamedTuple):
    """The best drafts by lookup of a batch's rows."""

    lengths: list[int]
    rate: float  # tokens per second of all rows


@dataclass(slots=True)
class _Row:
    """What came of one row, by bin."""

    hits: array[float] = field(default_factory=lambda: _zeros(len(FIRST)))
    seen: array[float] = field(default_factory=lambda: _zeros(len(FIRST)))
    at: float = 0.0  # when they were last faded

    def fade(self, now: float) -> None:
        if now > self.at:
            share = 0.5 ** ((now - self.at) / ROW_HALF_LIFE)
            for counts in (self.hits, self.seen):
                counts[:] = array("d", [share * n for n in counts])
            self.at = now


class Matches(Fading):
    """Decayed hits and misses by bin of match length and draft position.

    A token of a draft follows a longer match than the one before it, if that was right. So a position's estimate is
    shrunk to that of all tokens that follow as long a match, whatever their position. What such tokens of the row
    itself came to lately corrects both: one row goes round in circles while another only seems to.
    """

    def __init__(self, passed: Passed | None = None) -> None:
        super().__init__(HALF_LIFE, passed)
        bins = len(FIRST)
        self._hits, self._seen = _zeros(bins * MOST_FOUND), _zeros(bins * MOST_FOUND)  # [bins, positions]
        self._pooled_hits, self._pooled_seen = _zeros(bins), _zeros(bins)
        self._rows: dict[int, _Row] = {}

    def _divide(self, by: float) -> None:
        for counts in (self._hits, self._seen, self._pooled_hits, self._pooled_seen):
            counts[:] = array("d", [count / by for count in counts])

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forget all rows but these."""
        if len(self._rows) > len(rows):
            self._rows = {row: self._rows[row] for row in rows if row in self._rows}

    def take(self, tally: Tally, request_id: int) -> None:
        """Count what came after matches in a row, a token at a time; of its prompt, which comes first, as of a few."""
        self._fade()
        is_prompt = request_id not in self._rows
        share = min(1.0, MOST_OF_PROMPT / max(1, tally.num_tokens)) if is_prompt else 1.0
        own, weight = self._own(request_id), share * self._weight
        for at, (right, seen) in enumerate(zip(tally.right, tally.seen, strict=True)):
            if not seen:
                continue  # as of most lengths
            self._pooled_hits[at] += weight * right
            self._pooled_seen[at] += weight * seen
            own.hits[at] += share * right
            own.seen[at] += share * seen

    def knows(self, request_id: int) -> bool:
        """Whether anything came of a row."""
        return request_id in self._rows

    def _own(self, request_id: int) -> _Row:
        own = self._rows.get(request_id)
        if own is None:
            own = self._rows[request_id] = _Row(at=self.passed.tokens)
        own.fade(self.passed.tokens)
        return own

    def add(self, looked: Looked, request_id: int = 0, is_tallied: bool = False) -> None:
        """Count a draft's right tokens, and its first wrong one if it came to that.

        Args:
            is_tallied: what came after matches is told to `take`, too, so that only positions count.
        """
        self._fade()
        match, right, weight = looked.match, looked.num_right, self._weight
        first = bin_of(match)
        at = first * MOST_FOUND
        judged = min(right + 1, looked.num_compared, MOST_FOUND)
        right = min(right, judged)
        for counts, told in ((self._hits, right), (self._seen, judged)):
            for i in range(at, at + told):
                counts[i] += weight
        if is_tallied:
            return
        own, at = self._own(request_id), 0
        for pool in range(first, len(FIRST)):
            end = _end_of(pool, match)
            came, had = max(0, min(right, end) - at), min(judged, end) - at
            self._pooled_hits[pool] += came * weight
            self._pooled_seen[pool] += had * weight
            own.hits[pool] += came
            own.seen[pool] += had
            if judged <= end:
                break
            at = end

    def rights(self, request_id: int) -> list[float]:
        """By bin: how often what followed a match in a row the last time follows it again, a token at a time."""
        self._fade()
        first, own = FIRST_WEIGHT * self._weight, self._rows.get(request_id)
        pooled = [
            (hits + first * known) / (seen + first)
            for hits, seen, known in zip(self._pooled_hits, self._pooled_seen, FIRST, strict=True)
        ]
        if own is None:
            return pooled
        own.fade(self.passed.tokens)
        return [
            (came + ROW_WEIGHT * chance) / (of + ROW_WEIGHT)
            for came, of, chance in zip(own.hits, own.seen, pooled, strict=True)
        ]

    def survivals(self, match: int, request_id: int = 0, least: float = LEAST, most: int = MOST_FOUND) -> list[float]:
        """How likely a row's draft is right as far as each of its tokens, after a match of this length.

        Args:
            least: tokens less likely than this are left out, as are those below `LEAST`.
            most: tokens.
        """
        least = max(least, LEAST)
        own = self._rows.get(request_id)
        if own is not None:
            own.fade(self.passed.tokens)
        self._fade()
        weight, now = self._weight, bin_of(match)
        first, more = FIRST_WEIGHT * weight, POOL_WEIGHT * weight
        begin, end = now * MOST_FOUND, (now + 1) * MOST_FOUND
        hits, seen = self._hits[begin:end], self._seen[begin:end]
        out: list[float] = []
        survival, at = 1.0, 0
        for pool in range(now, len(FIRST)):
            end = min(most, _end_of(pool, match))
            pooled = (self._pooled_hits[pool] + first * FIRST[pool]) / (self._pooled_seen[pool] + first)
            pooled *= more
            came, of = (0.0, 0.0) if own is None else (own.hits[pool], own.seen[pool])
            of += ROW_WEIGHT
            for hit, had in zip(hits[at:end], seen[at:end], strict=True):
                survival *= (came + ROW_WEIGHT * (hit + pooled) / (had + more)) / of
                if survival < least:
                    return out
                out.append(survival)
            at = end
            if at == most:
                break
        return out


def choose(offers: Sequence[Sequence[float]], seconds: Sequence[float]) -> Choice:
    """How many of each row's offers to draft, for the most expected tokens per second.

    Args:
        offers: per row, how likely each token is come to, and right; falling.
        seconds: of a round of these rows that drafts 0, 1, 2, .. tokens in all.
    """
    if len(offers) == 1:
        length, rate = _choose_one(offers[0], seconds)
        return Choice([length], rate)
    merged = [(chance, row) for row, chances in enumerate(offers) for chance in chances]
    merged.sort(reverse=True)  # a row's own chances fall, so that any first of all offers are first of each row's
    tokens = float(len(offers))
    best, count = tokens / seconds[0], 0
    for i, (chance, _) in enumerate(merged[: len(seconds) - 1], 1):
        tokens += chance
        if tokens > best * seconds[i]:
            best, count = tokens / seconds[i], i
    lengths = [0] * len(offers)
    for _, row in merged[:count]:
        lengths[row] += 1
    return Choice(lengths, best)


def _choose_one(chances: Sequence[float], seconds: Sequence[float]) -> tuple[int, float]:
    """The same of a single row."""
    tokens, best, count = 1.0, 1 / seconds[0], 0
    for i, chance in enumerate(chances[: len(seconds) - 1], 1):
        tokens += chance
        if tokens > best * seconds[i]:
            best, count = tokens / seconds[i], i
    return count, best


def _end_of(pool: int, match: int) -> int:
    """Tokens of a draft after such a match until its tokens are those of the next pool."""
    return MOST_FOUND if pool == len(MATCH_EDGES) else min(MOST_FOUND, MATCH_EDGES[pool] - match)


def _zeros(count: int) -> array[float]:
    return array("d", bytes(8 * count))


def bin_of(match: int) -> int:
    return _POOLS[match] if match < len(_POOLS) else _POOLS[-1]
