"""`Lengths`: what a row drafts by lookup, by match, kept for some rounds.

To weigh a draft takes the interpreter as long as a small model takes for a layer, and little changes from one round to
the next. As long as it is kept, rounds may be decoded at once, by lookup too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from selfspec.control.matches import bin_of
from selfspec.control.plan import MATCH_EDGES

# Rounds, as long as nothing else is decided: at first, and after such in which something was drafted; else for twice as
# many each time, up to so many. Of models so fast that to weigh would take much of that time, more.
FIRST_KEPT, KEPT, MOST_KEPT = 16, 32, 128
WEIGHING = 0.02  # of the time of plain rounds
SAME = 0.05  # of tokens per second, by which what is usual may change without that
SHORTEST = (0, 1, *MATCH_EDGES)  # match of every bin; the first has none
WEIGH_SECONDS = 3e-4  # of the interpreter, on cold caches
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
        self._known: list[Weighed] = []  # by bin
        self._for: tuple[tuple[int, int], bool] | None = None  # a row, and whether layers draft
        self._usual = 0.0
        self._left, self._kept = 0, FIRST_KEPT  # rounds, the one that began among them; and for how many it is kept
        self._has_drafted = False  # since

    def is_due(self, row: tuple[int, int], usual: float, beside_layers: bool, plain_seconds: float) -> bool:
        """A round begins: whether drafts are to be weighed. Nothing is kept for another row, or where something else is
        usual.

        Args:
            row: see `RowState.whole`.
            plain_seconds: of a plain round.
        """
        told = row, beside_layers
        self._left -= 1
        if told == self._for and self._left > 0 and abs(usual - self._usual) <= SAME * self._usual:
            return False
        if self._for is None or row != self._for[0]:
            # Of its text nothing is known; where nothing was drafted in the one before, that is likely to be so again.
            if self._has_drafted:
                self._kept = FIRST_KEPT
            self._has_drafted = False
        self._for, self._usual = told, usual
        self._left = max(self._kept, int(WEIGH_SECONDS / (WEIGHING * plain_seconds)))
        return True

    def keep(self, known: Sequence[Weighed]) -> None:
        """What is drafted, after a match as in `SHORTEST` each."""
        self._known = [*known]
        self._kept = KEPT if self._has_drafted else min(2 * self._kept, MOST_KEPT)
        self._has_drafted = False

    def note(self) -> None:
        """Something is drafted."""
        self._has_drafted = True

    def pass_rounds(self, num_rounds: int = 1) -> None:
        """Count rounds that did not begin."""
        self._left -= num_rounds

    @property
    def rounds_left(self) -> int:
        """Rounds after this one for which what is known is kept."""
        return max(0, self._left - 1)

    def after(self, match: int) -> Weighed:
        """What is drafted after such a match."""
        return self._known[bin_of(match) + 1 if match else 0]

    def all(self) -> list[Weighed]:
        """After matches of 0, 1, 2, .. tokens; of more, as the last."""
        return [self.after(match) for match in range(SHORTEST[-1] + 1)]
