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
KEPT, KEPT_WATCHING = 16, 96
SHORTEST = (0, 1, *MATCH_EDGES)  # match of every bin; the first has none
LAST = len(SHORTEST) - 1
SETTLED = 4  # drafts that are right as a whole until they are weighed anew, where the last such time changed nothing
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


class Lengths:
    """By bin of matches, of a single row; what is drafted after a bin's shortest match is after all of it."""

    def __init__(self) -> None:
        self._known: dict[int, Weighed] = {}  # by bin
        self._changed: set[int] = set()  # bins
        self._until: dict[int, int] = {}  # by bin: right drafts until it is weighed anew, where that changed nothing
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
            for kept in (self._known, self._changed, self._until):
                kept.clear()
        if only_long:  # the others are weighed when they are asked about again
            self._known = {at: one for at, one in self._known.items() if at == LAST}
        for at in (LAST,) if only_long else range(len(SHORTEST)):
            if at in self._changed or at not in self._known:
                before, now = self._known.get(at), weigh(SHORTEST[at])
                self._known[at] = now
                self._changed.discard(at)
                if before is not None:
                    self._until[at] = SETTLED if before.length == now.length else 1

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

    def change(self, match: int) -> None:
        """There was a draft after such a match that was all right: what is drafted may be weighed anew."""
        at = _bin_of(match)
        self._until[at] = self._until.get(at, 1) - 1
        if self._until[at] <= 0:
            self._changed.add(at)

    def until_change(self, match: int, others: Sequence[int] = ()) -> int:
        """After how many of such drafts it may be, where those after each of the `others` are counted apart."""
        at = _bin_of(match)
        return max(1, self._until.get(at, 1) // max(1, sum([_bin_of(other) == at for other in others])))

    def all(self) -> list[Weighed]:
        """After matches of 0, 1, 2, .. tokens; of more, as the last."""
        return [self.after(match) for match in range(SHORTEST[-1] + 1)]


def _bin_of(match: int) -> int:
    return bin_of(match) + 1 if match else 0
