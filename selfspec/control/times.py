"""`Times`: seconds of the rounds of one batch size in one range of context lengths, by what they draft.

A round that has run counts with the decayed mean of what it took, of the half-life `OVERALL`. Seconds of rounds that
draft are kept relative to plain rounds of the same minute, so that a machine that becomes slower for all rounds changes
no choice. A round that has not run counts with its calibrated time (`Costs`), in proportion to the measured times of
rounds like it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

import numpy as np

from selfspec.control.acceptance import OVERALL, Decayed, Floats, TokenClock
from selfspec.control.costs import CONTEXT, Costs
from selfspec.control.drafters import MOST, MOST_FOUND, Drafter
from selfspec.core import LOOKUP

# Plain rounds whose times are kept; their lower quartile counts. The first rounds after a prompt, and those that other
# processes delay, take longer. A machine that became faster is noticed after 3 rounds, one that became slower after 6.
PLAIN_READINGS = 8
PLAIN_WINDOWS = 2.0  # windows of the ledger after which plain rounds are measured again
CALIBRATED = 1.0  # readings that a calibrated time counts as
LOOKUP_EDGES = (1, 2, 3, 4, 5, 6, 8, 12, 18, 32, 64, 96, 128, 192)  # least drafted tokens of all rows, by bin
LOOKUP_GRID = (0, 1, 2, 3, 4, 5, 7, 11, 17, 31, 63)  # drafted tokens per row at which calibrated times are computed
MOST_PACKED = 256  # tokens drafted by lookup in a round, at most: their logits are in memory at once
MOST_OFF = 2.0  # a reading counts as at most so many times the mean of those before
CONTEXT_EDGES = (512, 2048, 8192, 32768)  # bounds between ranges of context lengths, in tokens per row
CONTEXT_STEP = 64  # growth of the rows in tokens after which calibrated times are computed again
_BINS = np.searchsorted(LOOKUP_EDGES, np.arange(1, MOST_PACKED + 1), "right") - 1
_FIRST = np.array(LOOKUP_EDGES) - 1


class Times:
    """Seconds of rounds of `num_rows` rows.

    Args:
        clock: emitted tokens per row.

    Attributes:
        measured_plain: seconds of a plain round: the lower quartile of the last ones; None before one was measured.
        plain_at: the seconds of decoding, of all batch sizes, until the last plain round.
    """

    def __init__(self, costs: Costs, num_rows: int, clock: TokenClock) -> None:
        self.num_rows, self._costs, self._clock = num_rows, costs, clock
        self._plain: deque[float] = deque(maxlen=PLAIN_READINGS)
        self.measured_plain: float | None = None
        self.plain_at = 0.0
        self._lookups = Decayed((2, len(LOOKUP_EDGES)), OVERALL, clock)
        self._drafts: dict[tuple[int | None, int | None], Decayed] = {}  # by drafter
        self._grids: dict[tuple[float, bool], Floats] = {}
        self._context = -1.0
        self.move(CONTEXT)

    def move(self, context: float) -> None:
        """Set the tokens per row, from which the calibrated time of reading the KV cache follows."""
        context = (context // CONTEXT_STEP + 0.5) * CONTEXT_STEP
        if context != self._context:
            self._context, self._grids = context, {}
            self._calibrated_plain = self._costs.plain_round(self.num_rows, context)

    # ----------------------------------------------------------------------------------------------------- measuring

    @property
    def plain_seconds(self) -> float:
        """Seconds of a plain round, calibrated before one was measured."""
        return self.measured_plain or self._calibrated_plain

    def add_plain(self, seconds: Iterable[float]) -> None:
        """Count plain rounds."""
        self._plain.extend([one for one in seconds if one > 0])
        if self._plain:
            self.measured_plain = sorted(self._plain)[len(self._plain) // 4]

    def add_lookup(self, num_drafted: int, seconds: float) -> None:
        """Count a round by lookup; `num_drafted`: tokens of all rows."""
        if num_drafted > 0:
            self._add(self._lookups, bisect_right(LOOKUP_EDGES, num_drafted) - 1, seconds)

    def add_draft(self, drafter: tuple[int | None, int | None], exit_layer: int, length: int, seconds: float) -> None:
        """Count a round that layers drafted.

        Args:
            drafter: `Drafter.key`.
            length: drafted tokens per row.
        """
        kept = self._drafts.get(drafter)
        if kept is None:
            kept = self._drafts[drafter] = Decayed((2, self._costs.num_layers - 1, MOST + 1), OVERALL, self._clock)
        self._add(kept, (exit_layer - 1) * (MOST + 1) + min(length, MOST), seconds)

    def _add(self, kept: Decayed, cell: int, seconds: float) -> None:
        plain = self.measured_plain
        if plain is None or not (plain > 0 and seconds > 0):
            return
        half, ratio = len(kept.cells) // 2, seconds / plain
        total, readings = kept.cells[cell], kept.cells[cell + half]
        kept.add(cell, min(ratio, MOST_OFF * total / readings) if readings > 0 else ratio)
        kept.add(cell + half, 1.0)

    # ------------------------------------------------------------------------------------------------------- reading

    def lookups(self) -> Floats:
        """Seconds of rounds by lookup in which all rows together draft 0, 1, 2, .. tokens."""
        calibrated = self._calibrated_lookups() / self._calibrated_plain
        ratios, readings = self._lookups.now()
        bins = _BINS[: len(calibrated)]
        usual = calibrated * _factor(ratios, readings * calibrated[np.minimum(_FIRST, len(calibrated) - 1)])
        relative = np.maximum.accumulate((ratios[bins] + CALIBRATED * usual) / (readings[bins] + CALIBRATED))
        return self.plain_seconds * np.concatenate(((1.0,), relative))

    def drafts(self, drafter: Drafter) -> Floats:
        """Seconds of rounds that layers draft, `[L - 1, MOST + 1]`, by exit layer and verified drafts per row.

        Where none is verified, the only one is withdrawn.
        """
        relative = self._calibrated_drafts(drafter)
        if drafter.key in self._drafts:
            ratios, readings = self._drafts[drafter.key].now()
            expected = readings * relative
            of_layer = _factor(ratios.sum(1), expected.sum(1), _factor(ratios, expected))
            relative = (ratios + CALIBRATED * relative * of_layer[:, None]) / (readings + CALIBRATED)
        return self.plain_seconds * relative

    def _calibrated_lookups(self) -> Floats:
        """`lookups` from 1 drafted token on, calibrated."""
        costs, rows = self._costs, self.num_rows
        drafted = np.arange(1, min(rows * MOST_FOUND, MOST_PACKED) + 1) / rows
        grid = costs.cache.get(("lookups", rows))
        if grid is None:
            rounds = [costs.round(LOOKUP, (n,) * rows) for n in LOOKUP_GRID]
            grid = costs.cache["lookups", rows] = np.interp(drafted, LOOKUP_GRID, rounds)
        first = costs.reading(rows, self._context)
        return np.asarray(grid + first + (costs.reading(rows, self._context, 2) - first) * drafted)

    def _calibrated_drafts(self, drafter: Drafter) -> Floats:
        """`drafts` over the time of a plain round, calibrated."""
        key = drafter.share, drafter.by_copies
        if key not in self._grids:
            costs, rows = self._costs, self.num_rows
            terms = costs.cache.get(("drafts", rows, key[1]))
            if terms is None:
                terms = costs.cache["drafts", rows, key[1]] = _terms(costs, rows, key[1])
            first = costs.reading(rows, self._context)
            factors = np.array((1.0, drafter.share, first, costs.reading(rows, self._context, 2) - first))
            grid = self._grids[key] = np.dot(factors, terms) / self._calibrated_plain
            judging = drafter.share * costs.head(rows) / self._calibrated_plain
            grid[:, 0] = np.maximum(grid[:, 0], 1 + judging)  # all of a plain round, and the draft's head
        return self._grids[key]


def _terms(costs: Costs, rows: int, copies: bool) -> Floats:
    """The terms of calibrated rounds, `[L - 1, 4, MOST + 1]`, by exit layer and verified drafts per row.

    Fixed seconds; seconds of the draft's heads over the whole vocabulary; passes over all layers of one token per row,
    and of one further token per row.
    """
    layers, drafted = costs.num_layers, np.arange(MOST + 1)
    steps = np.maximum(drafted, 1)
    exits = np.arange(1, layers)[:, None]
    head = costs.copies.head if copies and costs.copies is not None else costs.head
    bare = np.array([[costs.step(e, rows, draft_share=0.0, copies=copies)] for e in range(1, layers)])
    whole = np.array([costs.verify(LOOKUP, rows, rows * (1 + n)) for n in range(MOST + 1)])
    judging = np.minimum(whole, [costs.head(rows * (1 + n)) for n in range(MOST + 1)])
    verified = np.ones((layers - 1, 1)) if copies else 1 - exits / layers
    passes = steps if copies else drafted + 1  # copies do not run over the last drafted token
    terms = np.empty((layers - 1, 4, MOST + 1))
    terms[:, 0] = passes * bare + verified * (whole - judging) + judging
    terms[:, 1] = steps * head(rows)
    terms[:, 2] = passes * exits / layers + verified
    terms[:, 3] = verified * drafted
    return terms


def _factor(ratios: Floats, expected: Floats, usual: Floats | float | None = None) -> Floats:
    """Measured over calibrated time of rounds like those that were not measured; with `usual`, of each entry."""
    if usual is None:
        return np.asarray((ratios.sum() + CALIBRATED) / (expected.sum() + CALIBRATED))
    return np.asarray((ratios + CALIBRATED * usual) / (expected + CALIBRATED))


class AllTimes:
    """`Times` of every batch size and range of context lengths, made at the first use."""

    def __init__(self, costs: Costs, clock: TokenClock) -> None:
        self._costs, self._clock = costs, clock
        self.seconds = 0.0
        """Seconds of decoding so far."""
        self._known: dict[tuple[int, int], Times] = {}

    def of(self, num_rows: int, context: float) -> Times:
        """The times of a batch whose rows hold `context` tokens each."""
        key = num_rows, bisect_right(CONTEXT_EDGES, context)
        if key not in self._known:
            self._known[key] = Times(self._costs, num_rows, self._clock)
        return self._known[key]
