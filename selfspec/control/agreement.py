"""`Agreement`: how often copies of the layers are right where the layers would be.

Rounding costs little of a model that was trained, and may cost nearly all of one whose logits lie close together.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from selfspec.control.fading import Fading, Passed
from selfspec.control.tracker import Floats

# Tokens after which an observation counts half, here and in what is kept: it is the model's more than the text's.
HALF_LIFE, OVERALL = 4000.0, 8000.0
# Right tokens that full agreement is believed for at first, and the agreement of all exits for that of one.
BELIEVED, POOLED = 20.0, 10.0
KNOWN = 2.0  # times as many tokens as are believed, from which on it is known
AS_GOOD = 0.9  # agreement from which on what copies came to says how often the layers are right
PRIOR_SIZE = 100.0  # most tokens that what was kept counts for
MOST_LATER = 1024  # drafts that wait to be counted in what is kept


class Agreement(Fading):
    """How many tokens copies got right, of those that the layers would have.

    Args:
        prior: what `state` of an earlier one of the same model returned; anything else is passed over.
    """

    def __init__(self, num_layers: int, passed: Passed, prior: Any = None) -> None:
        super().__init__(HALF_LIFE, passed)
        self._overall = _read(prior, num_layers)
        self._later: list[tuple[int, float, float, float]] = []  # what is not in there yet: line, counts and when
        self._overall_at = passed.tokens  # when it was last faded
        self._came, self._expected = self._overall * min(1.0, PRIOR_SIZE / max(1.0, float(self._overall[1].sum())))
        self._all_came, self._all_expected = float(self._came.sum()), float(self._expected.sum())

    def add(self, exit_layer: int, came: float, expected: float) -> None:
        """Count tokens of a draft by copies that were right, and as many as the layers would have had right."""
        self._fade()
        line, weight = exit_layer - 1, self._weight
        self._came[line] += came * weight
        self._expected[line] += expected * weight
        self._all_came += came * weight
        self._all_expected += expected * weight
        self._later.append((line, came, expected, self.passed.tokens))
        if len(self._later) > MOST_LATER:
            self._count_later()

    def _count_later(self) -> None:
        now = self.passed.tokens
        self._overall *= 2 ** ((self._overall_at - now) / OVERALL)
        if self._later:
            lines, *counts, at = zip(*self._later, strict=True)
            weights = np.exp2((np.array(at) - now) / OVERALL)
            for overall, told in zip(self._overall, counts, strict=True):
                overall += np.bincount(lines, told * weights, len(overall))
        self._later, self._overall_at = [], now

    def _divide(self, by: float) -> None:
        self._came /= by
        self._expected /= by
        self._all_came, self._all_expected = self._all_came / by, self._all_expected / by

    @property
    def pooled(self) -> float:
        """Of all exits together, at most 1."""
        self._fade()
        believed = BELIEVED * self._weight
        return min(1.0, (self._all_came + believed) / (self._all_expected + believed))

    @property
    def is_good(self) -> bool:
        """Whether it is known that what copies get wrong, the layers mostly would, too."""
        return self.is_known and self.pooled >= AS_GOOD

    @property
    def is_known(self) -> bool:
        """Whether it comes from tokens that came rather than from what is believed at first."""
        self._fade()
        return self._all_expected >= KNOWN * BELIEVED * self._weight

    def ratios(self) -> Floats:
        """`[L - 1]`, at most 1: each exit's, shrunk to that of all of them."""
        pooled = self.pooled
        weight = POOLED * self._weight
        ratios: Floats = np.minimum((self._came + weight * pooled) / (self._expected + weight), 1.0)
        return ratios

    def state(self) -> list[list[float]]:
        """Plain numbers for a later one to start from."""
        self._count_later()
        came, expected = self._overall.round(2).tolist()
        return [came, expected]


def _read(given: Any, num_layers: int) -> Floats:
    """Tokens `[2, L - 1]` from `Agreement.state`; none where they are not told, or nonsense."""
    try:
        counts = np.array(given, np.float64)
    except (TypeError, ValueError):
        counts = np.empty(0)
    fits = counts.shape == (2, num_layers - 1) and bool(np.isfinite(counts).all() and (counts >= 0).all())
    return counts if fits else np.zeros((2, num_layers - 1))
