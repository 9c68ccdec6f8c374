"""`Times`: seconds that rounds of one batch size and range of context lengths took, by what they drafted.

Seconds of rounds that draft are kept relative to plain rounds of the same minute, so that a machine that becomes slower
for all rounds changes no choice. A measured mean replaces a calibrated one as readings come in. Rounds that have not
run are calibrated times, in proportion to the measured times of rounds like them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable

import numpy as np

from selfspec.control.acceptance import Decayed, Floats, TokenClock

# Plain rounds whose times are kept. The first rounds after a prompt, and those that other processes delay, take longer.
PLAIN_READINGS = 16
PLAIN_EVERY = 32, 512  # rounds between plain ones, while drafts run: at first; the number doubles up to the most
HALF_LIFE = 1024.0  # of readings of other rounds, in emitted tokens per row
CALIBRATED = 1.0  # readings that a calibrated time counts as
LOOKUP_EDGES = (1, 2, 3, 4, 5, 6, 8, 12, 18, 32, 64, 96, 128, 192)  # least drafted tokens of all rows, by bin
MOST_OFF = 2.0  # a reading counts as at most so many times the mean of those before
CONTEXT_EDGES = (512, 2048, 8192, 32768)  # bounds between ranges of context lengths, in tokens per row


class Times:
    """Decayed means of what rounds took.

    Args:
        shape: number of exit layers, and of draft lengths from 0.
        clock: emitted tokens per row.
    """

    def __init__(self, shape: tuple[int, int], clock: TokenClock) -> None:
        self._shape, self._clock = shape, clock
        self._plain: deque[float] = deque(maxlen=PLAIN_READINGS)
        self.calibrated_plain = math.inf
        """Calibrated seconds of a plain round."""
        self.since_plain, self.plain_interval = 0, PLAIN_EVERY[0]
        """Rounds since the last plain one, and after how many plain rounds are measured again."""
        self._lookups = Decayed((2, len(LOOKUP_EDGES)), HALF_LIFE, clock)
        self._exits: dict[Hashable, Decayed] = {}  # by drafter

    @property
    def plain_seconds(self) -> float | None:
        """Seconds of a plain round: the lower quartile of the last ones; None before one was measured.

        While few were measured, no more than `calibrated_plain`.
        """
        if not self._plain:
            return None
        found = sorted(self._plain)[len(self._plain) // 4]
        return found if len(self._plain) >= PLAIN_READINGS // 2 else min(found, self.calibrated_plain)

    def add_plain(self, seconds: float) -> None:
        """Count a plain round."""
        if seconds > 0:
            self._plain.append(seconds)

    def add_lookup(self, num_drafted: int, seconds: float) -> None:
        """Count a round by lookup; `num_drafted`: tokens of all rows."""
        if num_drafted > 0:
            self._add(self._lookups, bisect_right(LOOKUP_EDGES, num_drafted) - 1, seconds)

    def add_draft(self, drafter: Hashable, exit_layer: int, num_drafted: int, seconds: float) -> None:
        """Count a round that layers drafted; `num_drafted`: tokens per row."""
        kept = self._exits.get(drafter)
        if kept is None:
            kept = self._exits[drafter] = Decayed((2, *self._shape), HALF_LIFE, self._clock)
        self._add(kept, (exit_layer - 1) * self._shape[1] + min(num_drafted, self._shape[1] - 1), seconds)

    def _add(self, kept: Decayed, cell: int, seconds: float) -> None:
        plain = self.plain_seconds
        if plain is None or not (plain > 0 and seconds > 0):
            return
        half, ratio = len(kept.cells) // 2, seconds / plain
        total, readings = kept.cells[cell], kept.cells[cell + half]
        kept.add(cell, min(ratio, MOST_OFF * total / readings) if readings > 0 else ratio)
        kept.add(cell + half, 1.0)

    def lookups(self, calibrated: Floats) -> Floats:
        """Relative seconds of rounds by lookup in which all rows draft 1, 2, .. tokens; `calibrated`: the same."""
        ratios, readings = self._lookups.now()
        bins = _BINS[: len(calibrated)]
        typical = calibrated[np.minimum(_FIRST, len(calibrated) - 1)]
        usual = calibrated * _factor(ratios, readings * typical)
        return np.maximum.accumulate((ratios[bins] + CALIBRATED * usual) / (readings[bins] + CALIBRATED))

    def drafts(self, drafter: Hashable, calibrated: Floats) -> Floats:
        """Relative seconds of rounds that layers draft, `[exit layers, draft lengths]`; `calibrated`: the same."""
        if drafter not in self._exits:
            return calibrated
        ratios, readings = self._exits[drafter].now()
        expected = readings * calibrated
        of_layer = _factor(ratios.sum(1), expected.sum(1), _factor(ratios, expected))
        usual = calibrated * of_layer[:, None]
        return np.asarray((ratios + CALIBRATED * usual) / (readings + CALIBRATED))


def _factor(ratios: Floats, expected: Floats, usual: Floats | float | None = None) -> Floats:
    """Measured over calibrated time of rounds like those that were not measured; with `usual`, of each entry."""
    if usual is None:
        return np.asarray((ratios.sum() + CALIBRATED) / (expected.sum() + CALIBRATED))
    return np.asarray((ratios + CALIBRATED * usual) / (expected + CALIBRATED))


_BINS = np.searchsorted(LOOKUP_EDGES, np.arange(1, 257), "right") - 1
_FIRST = np.array(LOOKUP_EDGES) - 1


class AllTimes:
    """`Times` of every batch size and range of context lengths, made at the first use."""

    def __init__(self, shape: tuple[int, int], clock: TokenClock) -> None:
        self._shape, self._clock = shape, clock
        self._known: dict[tuple[int, int], Times] = {}

    def of(self, num_rows: int, context: float) -> Times:
        """The times of a batch whose rows hold `context` tokens each."""
        key = num_rows, bisect_right(CONTEXT_EDGES, context)
        if key not in self._known:
            self._known[key] = Times(self._shape, self._clock)
        return self._known[key]
