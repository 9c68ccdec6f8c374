"""`Weighing`: what a row drafts by lookup after matches of every length, by what earlier guesses came to."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.finder import Finder
from selfspec.control.growth import LEAST
from selfspec.control.lengths import SHORTEST, Weighed, growing
from selfspec.control.matches import LONG, MOST_FOUND, choose
from selfspec.control.reading import may_interrupt
from selfspec.control.worth import Worth

CIRCLES = (1.0,) * MOST_FOUND  # how likely a draft is right as far as each token, in text that repeats itself
PLAN_SECONDS = 4e-5  # that the interpreter takes for a round by lookup among others, beyond one that is as those before


class Weighing:
    """Weighs what a finder knows."""

    def __init__(self, finder: Finder) -> None:
        self._finder = finder

    def all(self, request_id: int, worth: Worth, usual: float) -> list[Weighed]:
        """After matches as in `SHORTEST`, of a row that has its own text alone to look in.

        Args:
            usual: tokens per second, that a draft must promise.
        """
        return [self._weigh(request_id, match, worth, usual) for match in SHORTEST]

    def _may_branch(self, match: int, worth: Worth, usual: float, chances: Sequence[float]) -> bool:
        """Whether what is drafted depends on the alternatives to its first token."""
        if not (chances and self._finder.branches and may_interrupt(worth)):
            return False
        least = usual * worth.least_lookup / self._finder.trust_after(match).ratio
        return (1 - chances[0]) * self._finder.ranks.rates[0] >= max(LEAST, least)

    def _weigh(self, request_id: int, match: int, worth: Worth, usual: float) -> Weighed:
        if not match:
            return Weighed(0)
        finder, trust, seconds = self._finder, self._finder.trust_after(match), worth.lookups()
        chances = finder.matches.survivals(match, request_id, most=1) if finder.looks_up else []
        if not finder.could_pay([chances], seconds, usual, finder.branches, trust):
            return Weighed(0)
        if chances:
            chances = finder.matches.survivals(match, request_id, most=finder.most)
        (length,), rate = choose([chances], seconds)
        forecast = rate * seconds[length]
        promised = trust.ratio * forecast / (seconds[length] + PLAN_SECONDS)
        if promised < usual:
            length = 0
        may_branch = self._may_branch(match, worth, usual, chances)
        grown = growing(length, choose([CIRCLES[: finder.most]], seconds).lengths[0]) if match >= LONG else ()
        return Weighed(length, promised, forecast, may_branch, grown)
