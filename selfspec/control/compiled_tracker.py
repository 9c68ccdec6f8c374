"""`CompiledTracker`: the same statistics, with compiled estimates; see `selfspec/kernels/cpu/choice.cpp`."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import numpy as np

from selfspec.control.plan import NUM_BINS
from selfspec.control.tracker import (
    BOUNDS,
    CURVE_WEIGHT,
    HALF_LIVES,
    LOG_ODDS,
    MOST_STEP,
    PRECISION,
    RECALLED,
    WEIGHTS,
    Floats,
    Tracker,
)
from selfspec.kernels.compiled_call import Known, functions, loaded


class CompiledTracker(Tracker):
    """Estimates stay where they are until the next ones are made.

    Attributes:
        known: what compiled functions read of it.
    """

    def __init__(self, num_layers: int, prior: Any = None) -> None:
        super().__init__(num_layers, prior)
        lib, lines = functions(), num_layers - 1
        self._count, self._estimate = lib.selfspec_count, lib.selfspec_estimate
        self.right, self.share = (array("d", bytes(8 * lines * NUM_BINS)) for _ in range(2))
        self.totals = array("d", bytes(8 * lines))
        held = (self._counts, BOUNDS, self._expected, self._wider, self._curve, self._mean, LOG_ODDS)
        outputs = [each.buffer_info()[0] for each in (self.right, self.share, self.totals)]
        constants = *WEIGHTS.flat, *PRECISION.flat, CURVE_WEIGHT, MOST_STEP, RECALLED, *HALF_LIVES
        self.known = Known(lines, NUM_BINS, *[each.ctypes.data for each in held], *constants, *outputs)
        self._address = ctypes.addressof(self.known)

    def _settle(self) -> None:
        """See `Tracker`."""
        cells, drafts = self._cells, self._drafts
        if not (cells or self._drafts_at or self._clock != self._counted_at):
            return
        told = cells.buffer_info()[0], self._cells_at.buffer_info()[0], len(cells)
        of_drafts = drafts.buffer_info()[0], self._drafts_at.buffer_info()[0], self._sure.buffer_info()[0]
        self._count(self._address, *told, *of_drafts, len(self._drafts_at), self._clock, self._counted_at)
        self._forget_waiting()

    def look(self) -> None:
        """Estimate anew."""
        self._settle()
        self._estimate(self._address, self._fits_now())

    def estimates(self) -> tuple[Floats, Floats]:
        """See `Tracker`."""
        self.look()
        right, share = (np.array(each).reshape(self._shape[1:]) for each in (self.right, self.share))
        return right, share


def tracker_of(num_layers: int, prior: Any = None) -> Tracker:
    """A tracker with compiled estimates, if anything else is compiled."""
    return Tracker(num_layers, prior) if loaded() is None else CompiledTracker(num_layers, prior)
