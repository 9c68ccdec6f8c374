"""`Agreement`: how often copies of the layers are right where the layers would be.

Rounding costs little of a model that was trained, and may cost nearly all of one whose logits lie close together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from selfspec.control.fading import Fading, Passed
from selfspec.control.tracker import Floats

# Tokens after which an observation counts half, here and in what is kept: it is the model's more than the text's.
HALF_LIFE, OVERALL = 1000.0, 2000.0
# Right tokens that full agreement is believed for at first, and the agreement of all exits for that of one.
BELIEVED, POOLED = 20.0, 10.0
KNOWN = 2.0  # times as many tokens as are believed, from which on it is known
AS_GOOD = 0.9  # agreement from which on what copies came to says how often the layers are right
PRIOR_SIZE = 100.0  # most tokens that what was kept counts for


class _Counts(Fading):
    """Tokens that came right, and that were to, by exit layer; older ones fade."""

    def __init__(self, half_life: float, passed: Passed, known: Floats) -> None:
        super().__init__(half_life, passed)
        self.came, self.expected = known[0].copy(), known[1].copy()
        self.in_all = [float(self.came.sum()), float(self.expected.sum())]

    def add(self, line: int, came: float, expected: float) -> None:
        weight = self.weight
        self.came[line] += came * weight
        self.expected[line] += expected * weight
        self.in_all[0] += came * weight
        self.in_all[1] += expected * weight

    @property
    def weight(self) -> float:
        """Of an observation now."""
        self._fade()
        return self._weight

    def _divide(self, by: float) -> None:
        self.came /= by
        self.expected /= by
        self.in_all[:] = [count / by for count in self.in_all]


class Agreement:
    """How many tokens copies got right, of those that the layers would have.

    Args:
        prior: what `state` of an earlier one of the same model returned; anything else is passed over.
    """

    def __init__(self, num_layers: int, passed: Passed, prior: Any = None) -> None:
        known = _read(prior, num_layers)
        thinned = known * min(1.0, PRIOR_SIZE / max(1.0, float(known[1].sum())))
        self._now, self._overall = _Counts(HALF_LIFE, passed, thinned), _Counts(OVERALL, passed, known)

    def add(self, exit_layer: int, came: float, expected: float) -> None:
        """Count tokens of a draft by copies that were right, and as many as the layers would have had right."""
        self._now.add(exit_layer - 1, came, expected)
        self._overall.add(exit_layer - 1, came, expected)

    @property
    def pooled(self) -> float:
        """Of all exits together, at most 1."""
        believed, (came, expected) = BELIEVED * self._now.weight, self._now.in_all
        return min(1.0, (came + believed) / (expected + believed))

    @property
    def is_good(self) -> bool:
        """Whether it is known that what copies get wrong, the layers mostly would, too."""
        return self.is_known and self.pooled >= AS_GOOD

    @property
    def is_known(self) -> bool:
        """Whether it comes from tokens that came rather than from what is believed at first."""
        least = KNOWN * BELIEVED * self._now.weight
        return self._now.in_all[1] >= least

    @property
    def counts(self) -> tuple[Floats, Floats]:
        """`[L - 1]` each, always in the same place: tokens that came right, and that were to, weighing more later."""
        return self._now.came, self._now.expected

    @property
    def believed(self) -> tuple[float, float]:
        """What every exit's are shrunk to: the agreement of all of them, and how many tokens that is worth."""
        return self.pooled, POOLED * self._now.weight

    def ratios(self) -> Floats:
        """`[L - 1]`, at most 1."""
        pooled, weight = self.believed
        ratios: Floats = np.minimum((self._now.came + weight * pooled) / (self._now.expected + weight), 1.0)
        return ratios

    def state(self) -> list[list[float]]:
        """Plain numbers for a later one to start from."""
        overall, weight = self._overall, self._overall.weight
        return [(counts / weight).round(2).tolist() for counts in (overall.came, overall.expected)]


def _read(given: Any, num_layers: int) -> Floats:
    """Tokens `[2, L - 1]` from `Agreement.state`; none where they are not told, or nonsense."""
    try:
        counts = np.array(given, np.float64)
    except (TypeError, ValueError):
        counts = np.empty(0)
    fits = counts.shape == (2, num_layers - 1) and bool(np.isfinite(counts).all() and (counts >= 0).all())
    return counts if fits else np.zeros((2, num_layers - 1))
