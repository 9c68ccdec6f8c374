"""`CompiledTracker`: the same statistics, with compiled estimates; see `selfspec/kernels/cpu/choice.cpp`."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import numpy as np

from selfspec.control.plan import NUM_BINS
from selfspec.control.tracker import (
    CURVE_WEIGHT,
    LOG_ODDS,
    MOST_STEP,
    OVERALL,
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
        self._estimate = functions().selfspec_estimate
        lines = num_layers - 1
        self.right, self.share = (array("d", bytes(8 * lines * NUM_BINS)) for _ in range(2))
        self.totals = array("d", bytes(8 * lines))
        held = (self._counts, self._overall, self._expected, self._wider, self._curve, self._mean, LOG_ODDS)
        outputs = [each.buffer_info()[0] for each in (self.right, self.share, self.totals)]
        constants = *WEIGHTS.flat, *PRECISION.flat, CURVE_WEIGHT, MOST_STEP, RECALLED, OVERALL
        self.known = Known(lines, NUM_BINS, *[each.ctypes.data for each in held], *constants, *outputs)
        self._address = ctypes.addressof(self.known)

    def look(self) -> None:
        """Estimate anew."""
        told = self._later.buffer_info()[0], self._later_at.buffer_info()[0], len(self._later)
        since = self._clock - self._overall_at
        self._estimate(self._address, *self._fading(), self._fits_now(), *told, self._clock, since)
        self._forget_later()

    def estimates(self) -> tuple[Floats, Floats]:
        """See `Tracker`."""
        self.look()
        right, share = (np.array(each).reshape(self._shape[1:]) for each in (self.right, self.share))
        return right, share


def tracker_of(num_layers: int, prior: Any = None) -> Tracker:
    """A tracker with compiled estimates, if anything else is compiled."""
    return Tracker(num_layers, prior) if loaded() is None else CompiledTracker(num_layers, prior)
