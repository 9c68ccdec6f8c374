"""`Reading`: which rows are looked up, which takes the interpreter time whether or not anything is found.

Beside a forward of a large model that time is little. The smaller the model, and the more rows share a forward, the
less of it is a row's, while a row's index and guesses take what they always take: so it is set beside what is saved.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.lengths import WEIGH_SECONDS
from selfspec.control.plan import LOOKUP, Plan
from selfspec.control.rows import RowOutcome, RowState
from selfspec.control.worth import Worth

FEW = 2  # rows that are looked up whatever is known of ragged verifications, and have branches beside what is found
READ_SECONDS = 1e-6  # to take one token into a row's index, where that is compiled as fast models are
ASK_SECONDS = 6e-5  # to ask for a row's guesses, and to set them beside what came; and once more per round
# Of two rows any guess ends the compiled call that goes on without: the next begins on cold caches, of which the first
# round takes longer, too.
END_SECONDS = 4e-4
PATIENCE, MOST_PAUSE = 8, 7  # rounds asked about in vain for each that is then passed over between two; most of those
FOLLOWED_PAUSE = 127  # the same of a row that is followed: it is asked about after matches that are worth a draft
SHARE = 0.02  # of the time decoded, that may go into it beyond what it saves
# Of the time of a row that is followed, that its index and to weigh what it drafts may take: most of that is for the
# prompt, and long prompts are what lookup is best at.
FOLLOW_SHARE = 0.04
TRIAL = 8  # rounds that must be affordable for a row to be asked about
KEPT = 256  # rounds that what was saved earlier pays for, at most; losses count in full, so what saved a lot must too
HOPED = tuple(0.9**n for n in range(1, 13))  # chances of half the rows' drafts, with which it must pay to be tried


class Reading:
    """An account in seconds, which a share of the decoded time is paid into, and everything that lookup saves.

    Rows are looked up one after another, as the account allows, so that the first tell whether the others are worth it.
    Rows with their own texts alone to look in need none: see `may_follow`, and `control.crowd`.

    Args:
        is_priced: whether it is known what verifying the drafts of many rows takes; if not, only few are looked up.
    """

    def __init__(self, is_priced: bool) -> None:
        self._is_priced, self._is_on = is_priced, True
        self._num_rows = 0
        self._can_pay = False
        self._balance, self._advance = 0.0, -1.0  # seconds; and of decoding, for which the share was paid in before
        self._decided, self._asking = 0.0, _asking(1)  # see `price`; and of one row
        self._read: dict[int, int] = {}  # tokens in the rows' indices, by request
        self._vain = 0  # rounds in a row in which these were looked up, and nothing was drafted by that
        self._followed: tuple[tuple[int, int], bool] = (-1, 0), False  # the last row that `may_follow` was asked of

    def may_follow(self, row: RowState, worth: Worth) -> bool:
        """Whether a single row's index, and to look into it, take little beside its forwards."""
        if self._followed[0] != row.whole:
            takes = WEIGH_SECONDS + READ_SECONDS * (row.content_length + row.room)
            self._followed = row.whole, takes <= FOLLOW_SHARE * worth.plain_seconds * row.room
        return self._followed[1]

    def is_on(self, num_rows: int) -> bool:
        """Whether so many rows may be looked up."""
        return self._is_on and self.knows(num_rows)

    def knows(self, num_rows: int) -> bool:
        """Whether it is known what verifying drafts of so many rows takes."""
        return num_rows <= FEW or self._is_priced

    @property
    def can_pay(self) -> bool:
        """Whether lookup could save more than it takes of as many rows as there were last."""
        return self._can_pay

    def forget_rows(self) -> None:
        """The next rows are others, whatever their numbers."""
        self._read, self._followed = {}, ((-1, 0), False)

    def note(self, has_drafted: bool) -> None:
        """Whether anything came of the rows' guesses in a round."""
        self._vain = 0 if has_drafted else self._vain + 1

    @property
    def pause(self) -> int:
        """Plain rounds to pass over before the next one that is asked about: the more, the longer it was in vain."""
        return min(self._vain // PATIENCE, MOST_PAUSE)

    def price(self, num_rows: int, decided: float) -> None:
        """Take on what deciding takes in a round of so many rows: most of it is lookups, if there are several.

        Args:
            decided: seconds, by the clock.
        """
        self._decided = decided if num_rows > 1 else 0.0
        self._set_price(num_rows)

    def _set_price(self, num_rows: int) -> None:
        self._asking = max(_asking(num_rows) + _ending(num_rows), self._decided) / num_rows

    def begin(self, rows: Sequence[RowState], worth: Worth, usual: float) -> Sequence[RowState]:
        """The rows of a round that begins, without guesses where they are not looked up; empty where none are.

        Args:
            usual: tokens per second of all rows without.
        """
        if len(rows) != self._num_rows:
            self._num_rows, self._can_pay = len(rows), len(rows) == 1 or could_pay(worth, usual)
            self._set_price(len(rows))
        if self._advance < 0:
            self._advance = worth.plain_seconds * sum([row.room for row in rows]) / len(rows)
            self._balance += SHARE * self._advance
        if not self.knows(len(rows)):
            return ()
        if not self._is_on or not self._can_pay:
            # Guesses come with the next round's rows, once they can be paid for.
            self._is_on = self._can_pay and self._balance > self._to_begin(rows)
            return ()
        if self._balance < 0:
            self._is_on = False
            return ()
        read, indexing = self._affordable(rows)
        if not self._is_on:
            return ()
        self._balance -= indexing + self._asking * len(self._read)
        return read

    def _to_begin(self, rows: Sequence[RowState]) -> float:
        """What the account must hold for rows to be asked about from now on."""
        indexing = [READ_SECONDS * (row.content_length - self._read.get(row.request_id, 0)) for row in rows]
        return (1 + TRIAL * len(rows)) * self._asking + min(indexing)

    def _affordable(self, rows: Sequence[RowState]) -> tuple[Sequence[RowState], float]:
        """The rows, without guesses where nothing pays for an index; and seconds for the others' indices."""
        asking, read, known, left, indexing = self._asking, list[RowState](), dict[int, int](), self._balance, 0.0
        for row in rows:
            before = self._read.get(row.request_id)
            index = READ_SECONDS * (row.content_length - (before or 0))
            cost = index + asking + (TRIAL * asking if before is None else 0.0)
            if before is None and cost > left:
                read.append(row._replace(guesses=None))
                continue
            if before is None:
                self._vain = 0
            left, indexing = left - cost, indexing + index
            known[row.request_id] = row.content_length
            read.append(row)
        self._read, self._is_on = known, bool(known)
        return read, indexing

    def count(
        self,
        plan: Plan,
        outcomes: Sequence[RowOutcome],
        worth: Worth,
        usual: float,
        rounds: Sequence[float],
    ) -> None:
        """Count a round, and what lookup saved in it, by the table of costs.

        Args:
            usual: tokens per second of all rows without.
            rounds: seconds of rounds that layers draft in, by drafted tokens per row.
        """
        if plan.exit_layer is None:
            self.pass_round(worth.num_rows, worth.plain_seconds, 0.0)
        elif plan.exit_layer == LOOKUP:
            seconds = worth.lookups()
            took = seconds[min(sum([outcome.num_drafted for outcome in outcomes]), len(seconds) - 1)]
            took = max(worth.plain_seconds, took - self._decided)  # which was paid for when it began
            came = sum([outcome.num_emitted for outcome in outcomes])
            self.pass_round(worth.num_rows, took, came / usual - took)
        else:
            longest = max([outcome.num_drafted for outcome in outcomes])
            self.pass_round(worth.num_rows, rounds[min(longest, len(rounds) - 1)], 0.0)

    def pass_round(self, num_rows: int, seconds: float, saved: float) -> None:
        """Count a round that took `seconds`, by the table of costs, and what lookup saved in it."""
        paid = 0.0
        if self._advance > 0:
            paid = min(self._advance, seconds)
            self._advance -= paid
        most = max(self._balance, KEPT * num_rows * self._asking)
        self._balance = min(self._balance + SHARE * (seconds - paid) + saved, most)


def may_interrupt(worth: Worth) -> bool:
    """Whether a single row may be asked about in the middle of a call, which ends it: beside a long forward alone."""
    return _asking(1) + END_SECONDS <= SHARE * worth.plain_seconds


def could_pay(worth: Worth, usual: float) -> bool:
    """Whether lookup would save more than it takes if half the rows had drafts of which nearly every token is right."""
    rows, seconds, tokens = worth.num_rows, worth.lookups(), float(worth.num_rows)
    some, asking = rows // 2, _asking(rows) + _ending(rows)
    for n, chance in enumerate(HOPED, 1):
        tokens += some * chance
        drafted = some * n
        if drafted < len(seconds) and tokens > usual * (seconds[drafted] + asking):
            return True
    return False


def _asking(num_rows: int) -> float:
    """Seconds to ask for the guesses of so many rows."""
    return ASK_SECONDS * (1 + num_rows)


def _ending(num_rows: int) -> float:
    """Seconds that it takes beside, since a call ends with it that would go on; of more rows none would for long."""
    return END_SECONDS if 1 < num_rows <= FEW else 0.0
