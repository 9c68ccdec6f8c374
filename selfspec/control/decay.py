"""`Decayed`: counts in which older observations weigh less."""

from __future__ import annotations

import math
from array import array

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RESCALED = 32  # half-lives after which counts are brought to now, lest weights overflow


class Passed:
    """The clock of decayed counts: tokens emitted per row so far."""

    def __init__(self) -> None:
        self.tokens = 0.0


class Decayed:
    """Counts in which an observation weighs half after `half_life` tokens.

    Later observations weigh more, so that the passing of time touches no count; reading brings all of them to now.
    """

    def __init__(self, shape: tuple[int, ...], half_life: float, clock: Passed) -> None:
        self.cells = array("d", bytes(8 * math.prod(shape)))
        """The counts in a row: where `weight` times an observation is added."""
        self._counts: Floats = np.frombuffer(self.cells).reshape(shape)
        self._half_life, self._clock, self._at = half_life, clock, clock.tokens

    @property
    def weight(self) -> float:
        """Of an observation made now, in `cells`."""
        half_lives = (self._clock.tokens - self._at) / self._half_life
        if half_lives > RESCALED:
            self.now()
            return 1.0
        return math.exp2(half_lives)

    def add(self, cell: int, amount: float) -> None:
        """Count an observation made now."""
        weight = self.weight  # first: it may bring the cells to now
        self.cells[cell] += weight * amount

    def now(self) -> Floats:
        """The counts, in which an observation made now is 1: a view, which is true until time passes."""
        if self._at != self._clock.tokens:
            self._counts *= 2.0 ** ((self._at - self._clock.tokens) / self._half_life)
            self._at = self._clock.tokens
        return self._counts
