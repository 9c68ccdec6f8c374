"""`Fading`: counts in which older observations weigh less, without touching them as time passes."""

from __future__ import annotations

MOST = 1e9  # weight of an observation beyond which all counts are divided by it
HALF_LIVES = 64.0  # after which nothing is left


class Passed:
    """Time, in tokens emitted per row: told once a round, to all that fade by it."""

    def __init__(self) -> None:
        self.tokens = 0.0


class Fading:
    """Later observations weigh more instead of earlier ones less; whoever counts adds `_weight` after `_fade`.

    Args:
        half_life: emitted tokens per row after which an observation counts half.
        passed: what tells the time; default: its own.
    """

    def __init__(self, half_life: float, passed: Passed | None = None) -> None:
        self._half_life, self.passed = half_life, Passed() if passed is None else passed
        self._weight, self._at = 1.0, self.passed.tokens  # of an observation, and when that was last so

    def _fade(self) -> None:
        now = self.passed.tokens
        if now == self._at:
            return
        self._weight *= 2 ** min((now - self._at) / self._half_life, HALF_LIVES)
        self._at = now
        if self._weight > MOST:
            self._divide(self._weight)
            self._weight = 1.0

    def _divide(self, by: float) -> None:
        """Divide all counts."""
        raise NotImplementedError
