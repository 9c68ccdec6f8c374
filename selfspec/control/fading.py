"""`Fading`: counts in which older observations weigh less, without touching them as time passes."""

from __future__ import annotations

MOST = 1e9  # weight of an observation beyond which all counts are divided by it
HALF_LIVES = 20  # after which nothing is left


class Fading:
    """Later observations weigh more instead of earlier ones less; whoever counts adds `_weight` after `_fade`.

    Args:
        half_life: emitted tokens per row after which an observation counts half.
    """

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._weight = 1.0  # of an observation now
        self._age = 0.0  # tokens emitted per row since that was last so

    def pass_time(self, tokens: float) -> None:
        """Let older observations fade by `tokens` emitted tokens per row."""
        self._age += tokens
        if self._age > HALF_LIVES * self._half_life:
            self._fade()

    def _fade(self) -> None:
        self._weight *= 2 ** (self._age / self._half_life)
        self._age = 0.0
        if self._weight > MOST:
            self._divide(self._weight)
            self._weight = 1.0

    def _divide(self, by: float) -> None:
        """Divide all counts."""
        raise NotImplementedError
