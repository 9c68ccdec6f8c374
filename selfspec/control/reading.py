"""`Reading`: which rows are looked up, which takes the interpreter time whether or not anything is found.

Beside a forward of a large model that time is little. The smaller the model, and the more rows share a forward, the
less of it is a row's, while a row's index and guesses take what they always take: so it is set beside what is saved.
"""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.plan import LOOKUP, Plan, RowOutcome, RowState
from selfspec.control.worth import Worth

FEW = 2  # rows that are looked up whatever is known of ragged verifications, and have branches beside what is found
READ_SECONDS = 8e-6  # to take one token into a row's index
ASK_SECONDS = 6e-5  # to ask for a row's guesses, and to set them beside what came; and once more per round
# Of few rows the clock tells, too. Planning is what is clocked: to set guesses beside what came takes as long again,
# and in a round that is plain after all, so do asking at all, and a call for fewer rounds.
CLOCKED, CLOCKED_PLAIN = 2.0, 3.5
CLOCK_STEP, MOST_ASKING = 0.1, 5.0  # how fast that is followed; and the most, in what is taken on without it
PATIENCE, MOST_PAUSE = 8, 7  # rounds asked about in vain for each that is then passed over between two; most of those
SHARE = 0.02  # of the time decoded, that may go into it beyond what it saves
TRIAL = 8  # rounds that must be affordable for a row's index to be made
KEPT = 256  # rounds that what was saved earlier pays for, at most; losses count in full, so what saved a lot must too
# By how much more than is usual lookup must bring to have saved anything where layers draft, too: what it finds is
# easier than the rest of a text for them as well, so that without it they would bring more than beside it.
CAUTION = 1.3
HOPED = tuple(0.9**n for n in range(1, 13))  # chances of half the rows' drafts, with which it must pay to be tried


class Reading:
    """An account in seconds, which a share of the decoded time is paid into, and everything that lookup saves.

    Rows are looked up one after another, as the account allows, so that the first tell whether the others are worth it.

    Args:
        is_priced: whether it is known what verifying the drafts of many rows takes; if not, only few are looked up.
    """

    def __init__(self, is_priced: bool) -> None:
        self._is_priced, self._is_on = is_priced, True
        self._num_rows = 0
        self._can_pay = False
        self._balance, self._advance = 0.0, -1.0  # seconds; and of decoding, for which the share was paid in before
        self._decided, self._asking = 0.0, _asking(1)  # see `price`; and of one row
        self._slower = 1.0  # how much longer asking takes by the clock, of few rows
        self._read: dict[int, int] = {}  # tokens in the rows' indices, by request
        self._reads = False  # whether any was looked up for the last round
        self._vain = 0  # rounds in a row in which these were looked up, and nothing was drafted by that

    def is_on(self, num_rows: int) -> bool:
        """Whether so many rows may be looked up."""
        return self._is_on and (num_rows <= FEW or self._is_priced)

    def note(self, has_drafted: bool) -> None:
        """Whether anything came of the rows' guesses in a round."""
        self._vain = 0 if has_drafted else self._vain + 1

    @property
    def pause(self) -> int:
        """Plain rounds to pass over before the next one that is asked about: the more, the longer it was in vain."""
        return min(self._vain // PATIENCE, MOST_PAUSE)

    def price(self, num_rows: int, decided: float) -> None:
        """Take on what deciding takes in a round of so many rows: most of it is lookups, if there are more than a few.

        Args:
            decided: seconds, by the clock.
        """
        self._decided = decided if num_rows > FEW else 0.0
        self._set_price(num_rows)

    def clock(self, planned: float, is_plain: bool) -> None:
        """Take on what planning the last round took, if few rows were looked up for it.

        Args:
            planned: seconds.
            is_plain: whether nothing came of it, and nothing else is drafted.
        """
        if self._reads and self._num_rows <= FEW:
            took = (CLOCKED_PLAIN if is_plain else CLOCKED) * planned
            ratio = min(max(took / _asking(self._num_rows), 1.0), MOST_ASKING)
            self._slower += CLOCK_STEP * (ratio - self._slower)
            self._set_price(self._num_rows)

    def _set_price(self, num_rows: int) -> None:
        slower = self._slower if num_rows <= FEW else 1.0
        self._asking = max(slower * _asking(num_rows), self._decided) / num_rows

    def begin(self, rows: Sequence[RowState], worth: Worth, usual: float) -> Sequence[RowState]:
        """The rows of a round that begins, without guesses where they are not looked up; empty where none are.

        Args:
            usual: tokens per second of all rows without.
        """
        self._reads = False
        if len(rows) != self._num_rows:
            self._num_rows, self._can_pay = len(rows), len(rows) <= FEW or could_pay(worth, usual)
            self._set_price(len(rows))
        if self._advance < 0:
            self._advance = worth.plain_seconds * sum([row.room for row in rows]) / len(rows)
            self._balance += SHARE * self._advance
        if not self._is_priced and len(rows) > FEW:
            return ()
        asking = self._asking
        if not self._is_on or not self._can_pay or self._balance < 0:
            # Guesses come with the next round's rows, once they can be paid for again.
            least = min([READ_SECONDS * (row.content_length - self._read.get(row.request_id, 0)) for row in rows])
            self._is_on = self._can_pay and self._balance > (1 + TRIAL * len(rows)) * asking + least
            return ()
        read, known, left = [], dict[int, int](), self._balance
        for row in rows:
            before = self._read.get(row.request_id)
            cost = asking + READ_SECONDS * (row.content_length - (before or 0))
            if before is None and cost + TRIAL * asking > left:
                read.append(row._replace(guesses=None))
                continue
            if before is None:
                self._vain = 0
            left -= cost if before is not None else cost + TRIAL * asking
            self._balance -= cost
            known[row.request_id] = row.content_length
            read.append(row)
        self._read = known
        self._is_on = self._reads = bool(known)
        return read if known else ()

    def count(
        self,
        plan: Plan,
        outcomes: Sequence[RowOutcome],
        worth: Worth,
        usual: float,
        rounds: Sequence[float],
        beside_layers: bool,
    ) -> None:
        """Count a round, and what lookup saved in it, by the table of costs.

        Args:
            usual: tokens per second of all rows without.
            rounds: seconds of rounds that layers draft in, by drafted tokens per row.
            beside_layers: whether they would have drafted instead.
        """
        if plan.exit_layer is None:
            self.pass_round(worth.num_rows, worth.plain_seconds, 0.0)
        elif plan.exit_layer == LOOKUP:
            seconds = worth.lookups()
            took = seconds[min(sum([outcome.num_drafted for outcome in outcomes]), len(seconds) - 1)]
            took = max(worth.plain_seconds, took - self._decided)  # which was paid for when it began
            came = sum([outcome.num_emitted for outcome in outcomes])
            self.pass_round(worth.num_rows, took, came / (CAUTION * usual if beside_layers else usual) - took)
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


def could_pay(worth: Worth, usual: float) -> bool:
    """Whether lookup would save more than it takes if half the rows had drafts of which nearly every token is right."""
    rows, seconds, tokens = worth.num_rows, worth.lookups(), float(worth.num_rows)
    some, asking = rows // 2, _asking(rows)
    for n, chance in enumerate(HOPED, 1):
        tokens += some * chance
        drafted = some * n
        if drafted < len(seconds) and tokens > usual * (seconds[drafted] + asking):
            return True
    return False


def _asking(num_rows: int) -> float:
    """Seconds to ask for the guesses of so many rows."""
    return ASK_SECONDS * (1 + num_rows)
