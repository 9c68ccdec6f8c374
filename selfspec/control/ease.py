"""`Ease`: what layers come to where something is found, beside what they come to on the whole.

Text that was there before is easy for everybody: where lookup finds a long match, an early layer is oftener right, too.
Beside what layers do on the whole, drafts by lookup would seem to save what layers would have saved as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.fading import Fading, Passed

HALF_LIFE, BELIEVED = 400.0, 30.0  # tokens: see `Trust`
EVERY = 16  # rounds that lookup drafts for each that layers draft in its place, to tell what they would have come to
LEAST = 1.0  # ratio: where layers did worse than on the whole, they are not held to it
CLEAR = 1.5  # unless it promises so many times as much


class Ease(Fading):
    """Tokens that came, and were forecast, of a single row that layers drafted for; by strength of what was found."""

    def __init__(self, num_strengths: int, passed: Passed) -> None:
        super().__init__(HALF_LIFE, passed)
        self._came, self._forecast = [0.0] * num_strengths, [0.0] * num_strengths
        self._looked_up = [0] * num_strengths  # rounds since layers drafted

    def ratio(self, strength: int) -> float:
        """Of tokens that layers bring there, to those on the whole; at least 1."""
        self._fade()
        believed = BELIEVED * self._weight
        pool = _ratio(self._came, self._forecast, believed)
        own = (self._came[strength] + believed * pool) / (self._forecast[strength] + believed)
        return max(LEAST, own / pool)

    def is_wanted(self, strength: int, promised: float, usual: float) -> bool:
        """Whether layers had better draft, for once, where lookup promises so many tokens per second."""
        return promised < CLEAR * usual and self._looked_up[strength] >= EVERY

    @property
    def rounds_left(self) -> int:
        """Rounds that lookup may draft until layers may be wanted in place of one."""
        return min([EVERY - rounds for rounds in self._looked_up if rounds < EVERY], default=EVERY)

    def note(self, strength: int) -> None:
        """A round that lookup drafts."""
        self._looked_up[strength] += 1

    def add(self, strength: int, came: float, forecast: float) -> None:
        """What came of a round that layers drafted in."""
        self._fade()
        self._looked_up[strength] = 0
        self._came[strength] += came * self._weight
        self._forecast[strength] += forecast * self._weight

    def _divide(self, by: float) -> None:
        for counts in (self._came, self._forecast):
            counts[:] = [count / by for count in counts]


def _ratio(came: Sequence[float], forecast: Sequence[float], believed: float) -> float:
    return (sum(came) + believed) / (sum(forecast) + believed)
