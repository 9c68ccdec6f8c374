"""`Lengths`: what a row drafts by lookup, by match, kept for some rounds, and until there is something to learn.

To weigh a draft takes the interpreter as long as a small model takes for a layer, and little changes from one round to
the next. As long as it is kept, rounds may be decoded at once, by lookup too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from selfspec.control.matches import bin_of
from selfspec.control.plan import MATCH_EDGES
from selfspec.control.rows import RowState

# Rounds, as long as nothing else is decided: at first, and after such in which something was drafted; else for twice as
# many each time, up to so many. Of models so fast that to weigh would take much of that time, more.
FIRST_KEPT, KEPT, MOST_KEPT = 32, 64, 128
WEIGHING = 0.02  # of the time of plain rounds
# And until there was something to learn: each token that came as lookup would have guessed where it drafts nothing, and
# each of its drafts, but for those that grow by themselves, tells of about a plain round that could have been saved.
# So many at least, and as many as plain rounds fit into what weighing takes, with the call that it ends.
LEAST_SURPRISES = 4
OLD = 1024  # rounds beyond those for which it is kept, after which it is weighed whatever came
WEIGH_SECONDS, ENDING = 3e-4, 1e-3  # of the interpreter, on cold caches
SAME = 0.05  # of tokens per second, by which what is usual may change without that
SHORTEST = (0, 1, *MATCH_EDGES)  # match of every bin; the first has none
TO_ASK = -1  # instead of a length: nobody knows


class Weighed(NamedTuple):
    """What a row drafts by lookup after a match."""

    length: int  # tokens; 0: none, another round promises more
    promised: float = 0.0  # tokens per second
    forecast: float = 0.0  # tokens of the round
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
        self._has_drafted, self._told = False, 0  # since, and rounds by lookup that count as surprises
        self._most = 0  # surprises before it is weighed again

    def is_due(self, row: RowState, usual: float, beside_layers: bool, plain_seconds: float) -> bool:
        """A round begins: whether drafts are to be weighed. They are where something else is usual, and for another row
        where lookup drafted in the one before: where it did not, it is likely not to again.

        Args:
            plain_seconds: of a plain round.
        """
        told, known = (row.whole, beside_layers), self._for
        is_same = known is not None and known[1] == beside_layers and abs(usual - self._usual) <= SAME * self._usual
        is_other = known is None or known[0] != row.whole
        self._for = told
        if is_other:
            self._left = min(self._left, FIRST_KEPT)
        if is_same and not (is_other and self._has_drafted) and not self.is_surprised(row):
            self._left -= 1
            return False
        if is_other and self._has_drafted:
            self._kept = FIRST_KEPT  # of its text nothing is known
        self._usual = usual
        self._left = max(self._kept, int(WEIGH_SECONDS / (WEIGHING * plain_seconds)))
        self._most = max(LEAST_SURPRISES, math.ceil((WEIGH_SECONDS + ENDING) / plain_seconds))
        return True

    def keep(self, known: Sequence[Weighed]) -> None:
        """What is drafted, after a match as in `SHORTEST` each."""
        self._known = [*known]
        self._kept = KEPT if self._has_drafted else min(2 * self._kept, MOST_KEPT)
        self._has_drafted, self._told = False, 0

    def forget_row(self) -> None:
        """The next row is another one, whatever its number."""
        if self._for is not None:
            self._for = (-1, 0), self._for[1]

    def note(self) -> None:
        """Something is drafted."""
        self._has_drafted = True

    def note_told(self) -> None:
        """What came of that tells of its length."""
        self._told += 1

    def pass_rounds(self, num_rounds: int = 1) -> None:
        """Count rounds that did not begin."""
        self._left -= num_rounds

    @property
    def rounds_left(self) -> int:
        """Rounds after this one for which what is known is kept, whatever comes in them."""
        return max(0, self._left - 1)

    def surprises(self, guessed: Sequence[int]) -> int:
        """How many there were since.

        Args:
            guessed: see `RowState.guessed`.
        """
        missed = [count for one, count in zip(self._known[1:], guessed, strict=False) if not one.length]
        return self._told + sum(missed)

    def is_surprised(self, row: RowState) -> bool:
        """Whether the round that comes is one to weigh drafts in."""
        return self._left <= 1 and (self._left <= -OLD or self.surprises(row.guessed) >= self._most)

    @property
    def most_surprises(self) -> int:
        """Of rounds that nobody is asked about: after how many it is weighed."""
        return max(0, self._most - self._told)

    def after(self, match: int) -> Weighed:
        """What is drafted after such a match."""
        return self._known[bin_of(match) + 1 if match else 0]

    @property
    def all(self) -> Sequence[Weighed]:
        """After matches as in `SHORTEST`, and as long as the next one of these."""
        return self._known
