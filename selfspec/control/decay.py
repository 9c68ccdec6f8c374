"""`Decayed`: counts in which older observations weigh less."""

from __future__ import annotations

import math
from array import array

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MAX_HALF_LIVES = 32  # between two rescalings of counts, so that weights do not overflow


class TokenClock:
    """The clock of decayed counts: tokens emitted per row."""

    def __init__(self) -> None:
        self.tokens = 0.0


class Decayed:
    """Counts in which an observation weighs half after `half_life` tokens.

    Instead of decaying all counts at every token, later observations are added with a larger weight. Reading rescales.
    """

    def __init__(self, shape: tuple[int, ...], half_life: float, clock: TokenClock) -> None:
        self.cells = array("d", bytes(8 * math.prod(shape)))
        """The counts, flat and not rescaled. An observation is added to them times `weight`."""
        self._counts: Floats = np.frombuffer(self.cells).reshape(shape)
        self._half_life, self._clock, self._at = half_life, clock, clock.tokens

    @property
    def weight(self) -> float:
        """The weight in `cells` of an observation made now."""
        half_lives = (self._clock.tokens - self._at) / self._half_life
        if half_lives > MAX_HALF_LIVES:
            self.now()
            return 1.0
        return math.exp2(half_lives)

    def add(self, cell: int, amount: float) -> None:
        """Add an observation made now."""
        weight = self.weight  # first, since it may rescale the cells
        self.cells[cell] += weight * amount

    def now(self) -> Floats:
        """The counts, rescaled so that an observation made now is 1: a view that is valid until the clock advances."""
        if self._at != self._clock.tokens:
            self._counts *= 2.0 ** ((self._at - self._clock.tokens) / self._half_life)
            self._at = self._clock.tokens
        return self._counts
