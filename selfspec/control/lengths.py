"""`Lengths`: what a row drafts by lookup, by match, kept for some rounds.

To weigh a draft takes the interpreter as long as a small model takes for a layer, and little changes from one round to
the next. As long as it is kept, rounds may be decoded at once, by lookup too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from selfspec.control.matches import MATCH_EDGES, bin_of

# Rounds, as long as nothing else is decided: that ask; and that only watch for long matches, which tell less.
KEPT, KEPT_WATCHING = 32, 96
SHORTEST = (0, 1, *MATCH_EDGES)  # match of every bin; the first has none
LAST = len(SHORTEST) - 1
SMALL = 1e-6  # beside a round's share of those
TO_ASK = -1  # instead of a length: nobody knows


class Weighed(NamedTuple):
    """What a row drafts by lookup after a match."""

    length: int  # tokens; 0: none, another round promises more
    promised: float = 0.0  # tokens per second
    forecast: float = 0.0  # tokens of the round
    usual: float = 0.0  # tokens per second that it had to promise
    chances: Sequence[float] = ()  # that the draft is right as far as each token
    may_branch: bool = False  # what is drafted depends on other candidates, where there are any
    grown: tuple[int, ...] = ()  # tokens after one, two, .. right drafts in a row; more are as the last

    def after(self, streak: int) -> int:
        """Tokens after so many drafts in a row that were right as a whole."""
        return self.grown[min(streak, len(self.grown)) - 1] if streak and self.grown else self.length


def growing(length: int, most: int) -> tuple[int, ...]:
    """A draft that was right as a whole is followed by one twice as long, up to the longest that could pay: text that
    goes round in circles does so for long, and every draft that is too short costs a forward."""
    grown = []
    while 0 < length < most:
        length = min(2 * length, most)
        grown.append(length)
    return tuple(grown)


class Lengths:
    """By bin of matches, of a single row; what is drafted after a bin's shortest match is after all of it."""

    def __init__(self) -> None:
        self._known: dict[int, Weighed] = {}  # by bin
        self._for: tuple[int, float, bool] | None = None
        self._left = 0.0  # of all for which what is known is kept, 1

    def begin(
        self,
        request_id: int,
        usual: float,
        beside_layers: bool,
        weigh: Callable[[int], Weighed],
        only_long: bool = False,
    ) -> None:
        """A round begins. Nothing is kept for another row, or where something else is usual.

        Args:
            weigh: what is drafted after such a match, by all that is known now.
            only_long: nobody asks what is drafted after matches of any other than the last bin.
        """
        told = request_id, usual, beside_layers
        self._left -= 1 / (KEPT_WATCHING if only_long else KEPT)
        if told != self._for or self._left < SMALL:
            self._for, self._left = told, 1.0
            self._known.clear()
        if only_long:  # the others are weighed when they are asked about again
            self._known = {at: one for at, one in self._known.items() if at == LAST}
        for at in (LAST,) if only_long else range(len(SHORTEST)):
            if at not in self._known:
                self._known[at] = weigh(SHORTEST[at])

    def pass_watching(self) -> None:
        """Count a round that only watched, and did not begin."""
        self._left -= 1 / KEPT_WATCHING

    def rounds_left(self, only_long: bool = False) -> int:
        """Rounds after this one for which what is known is kept."""
        return max(0, math.ceil(self._left * (KEPT_WATCHING if only_long else KEPT) - SMALL) - 1)

    def after(self, match: int) -> Weighed:
        """What is drafted after such a match."""
        return self._known[_bin_of(match)]

    @property
    def after_long(self) -> Weighed | None:
        """The same after one of the last bin; None where nobody has asked."""
        return self._known.get(LAST)

    def all(self) -> list[Weighed]:
        """After matches of 0, 1, 2, .. tokens; of more, as the last."""
        return [self.after(match) for match in range(SHORTEST[-1] + 1)]


def _bin_of(match: int) -> int:
    return bin_of(match) + 1 if match else 0
