"""`Agreement`: how often copies of the layers are right where the layers would be.

Rounding costs little of a model that was trained, and may cost nearly all of one whose logits lie close together.
"""

from __future__ import annotations

import numpy as np

from selfspec.control.fading import Fading, Passed
from selfspec.control.tracker import Floats

HALF_LIFE = 200.0  # tokens after which an observation counts half
# Right tokens that full agreement is believed for at first, and the agreement of all exits for that of one.
BELIEVED, POOLED = 20.0, 10.0
AS_GOOD = 0.9  # agreement from which on what copies came to says how often the layers are right


class Agreement(Fading):
    """Tokens that copies got right, and that the layers would have, by exit layer; older ones fade."""

    def __init__(self, num_layers: int, passed: Passed) -> None:
        super().__init__(HALF_LIFE, passed)
        self._came, self._expected = np.zeros((2, num_layers - 1))
        self._in_all = [0.0, 0.0]  # their sums

    def add(self, exit_layer: int, came: float, expected: float) -> None:
        """Count tokens of a draft by copies that were right, and as many as the layers would have had right."""
        self._fade()
        self._came[exit_layer - 1] += came * self._weight
        self._expected[exit_layer - 1] += expected * self._weight
        self._in_all[0] += came * self._weight
        self._in_all[1] += expected * self._weight

    @property
    def pooled(self) -> float:
        """Of all exits together, at most 1."""
        self._fade()
        believed, (came, expected) = BELIEVED * self._weight, self._in_all
        return min(1.0, (came + believed) / (expected + believed))

    @property
    def is_good(self) -> bool:
        return self.pooled >= AS_GOOD

    def ratios(self) -> Floats:
        """`[L - 1]`, at most 1."""
        pooled, weight = self.pooled, POOLED * self._weight
        ratios: Floats = np.minimum((self._came + weight * pooled) / (self._expected + weight), 1.0)
        return ratios

    def _divide(self, by: float) -> None:
        self._came /= by
        self._expected /= by
        self._in_all[:] = [count / by for count in self._in_all]
