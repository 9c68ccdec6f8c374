"""`Reading`: which rows are looked up, which takes the interpreter time whether or not anything is found.

Beside a forward of a large model that time is little. The smaller the model, and the more rows share a forward, the
less of it is a row's, while a row's index and guesses take what they always take: so it is set beside what is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from selfspec.control.gate import GATE, Gate
from selfspec.control.plan import LOOKUP, Plan, RowOutcome, RowState
from selfspec.control.worth import Worth

FEW = 2  # rows that are looked up whatever is known of ragged verifications, and have branches beside what is found
READ_SECONDS = 4e-6  # to take one token into a row's index
ASK_SECONDS = 6e-5  # to ask for a row's guesses, and to set them beside what came; and once more per round
# Of two rows any guess ends the compiled call that goes on without: the next begins on cold caches, of which the first
# round takes longer, too.
END_SECONDS = 4e-4
# Of few rows the clock tells, too. Planning is what is clocked: to set guesses beside what came takes as long again,
# and in a round that is plain after all, so do asking at all, and a call for fewer rounds.
CLOCKED, CLOCKED_PLAIN = 2.0, 3.5
CLOCK_STEP, MOST_ASKING = 0.1, 5.0  # how fast that is followed; and the most, in what is taken on without it
PATIENCE, MOST_PAUSE = 8, 7  # rounds asked about in vain for each that is then passed over between two; most of those
WATCH_PAUSE = 31  # the same where rows are only watched
# Of the time decoded, that may go into it beyond what it saves; of few rows a few askings more, see `TRIAL`.
SHARE = 0.02
USUAL_TOKENS = 4  # of a round
# Of the time of few rows, that it is paid for beforehand; of more rows, all of it. Sampled texts seldom repeat
# themselves: those are watched first, which shows whether they do.
FEW_ADVANCE, SAMPLED_ADVANCE = 0.3, 0.1
TRIAL = 8  # rounds that must be affordable for rows to be asked about again; and the debt in which few are watched
WARIEST = 8  # of such trials there must be twice as many each time that much was lost, up to so many
COUNTED = 64  # rounds after which it counts what few rows saved that were only watched
KEPT = 256  # rounds that what was saved earlier pays for, at most; losses count in full, so what saved a lot must too
HOPED = tuple(0.9**n for n in range(1, 13))  # chances of half the rows' drafts, with which it must pay to be tried


class Hope(Enum):
    """Of drafts by lookup after long matches: that none is worth it, that one may be, or that they are."""

    NONE, SOME, SURE = range(3)


class Reading:
    """An account in seconds, which a share of the decoded time is paid into, and everything that lookup saves.

    Rows are looked up one after another, as the account allows, so that the first tell whether the others are worth it.
    Where it does not, few rows are watched: their indices are kept, and they are asked about after long matches.

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
        self._indexing = 0.0  # seconds that indices took in the last round that any was asked about for
        self._least, self._pays = -1.0, 0.0  # what the account must hold for rows to be asked about; what a round pays
        self.waits = False
        """Whether the rows of the last round were not asked about for want of a long match."""
        self._round = 0
        self._has_saved = False  # whether lookup has saved anything while rows wait
        self._vain = 0  # rounds in a row in which these were looked up, and nothing was drafted by that
        self._wary = 1  # trials that must be affordable
        self._gate = Gate()

    def is_on(self, num_rows: int) -> bool:
        """Whether so many rows may be looked up."""
        return self._is_on and (num_rows <= FEW or self._is_priced)

    def note(self, has_drafted: bool) -> None:
        """Whether anything came of the rows' guesses in a round."""
        self._vain = 0 if has_drafted else self._vain + 1
        if not has_drafted and self._is_few and self._least > 0:  # they were for a long match alone
            self._gate.shut()

    @property
    def rounds_left(self) -> int:
        """Rounds to come before few rows are asked about after all, or no more, if nothing is saved meanwhile."""
        if self._num_rows > FEW:
            return KEPT
        if self.waits or self.will_wait:
            least = self._least if self.is_waiting else self._trials(self._num_rows)
            unpaid = SHARE * max(0.0, self._advance)  # of what comes, since it was paid for beforehand
            until = COUNTED - 1 - self._round % COUNTED
            rounds = max(0, int((least - self._balance + unpaid) / self._pays))
            rounds = until if self._has_saved else min(rounds, until)
            return min(rounds, self._gate.opens_after or rounds)
        return max(0, int(self._balance / self._round_takes))

    @property
    def is_shut(self) -> bool:
        """Whether in those rounds, where rows wait or will, nobody is asked about however long their matches are."""
        return self._gate.opens_after > 0

    @property
    def will_wait(self) -> bool:
        """Whether the next round will, after one of few rows that was asked about, if nothing is saved in that."""
        if not self._is_few or self.waits:
            return False
        return self.is_waiting or self._balance < self._round_takes

    @property
    def _is_few(self) -> bool:
        return self._num_rows <= FEW

    @property
    def _round_takes(self) -> float:
        """Seconds, of few rows that are asked about, each."""
        return self._asking + USUAL_TOKENS * READ_SECONDS

    @property
    def pause(self) -> int:
        """Plain rounds to pass over before the next one that is asked about: the more, the longer it was in vain."""
        if self.waits:
            return min(WATCH_PAUSE, self._gate.opens_after or WATCH_PAUSE)
        return min(self._vain // PATIENCE, MOST_PAUSE)

    def pass_plain(self, num_rounds: int) -> None:
        """Count rounds that nobody was asked about."""
        self._gate.pass_rounds(num_rounds)

    def pass_alike(self) -> None:
        """Count a round in which few rows waited, and had no long match; their indices are paid for with the next."""
        self._round += 1
        self._gate.pass_rounds()
        self._gate.forgive()

    @property
    def is_waiting(self) -> bool:
        """Whether few rows are asked about after long matches alone, this round and from now on."""
        return self._least > 0

    def price(self, num_rows: int, decided: float) -> None:
        """Take on what deciding takes in a round of so many rows: most of it is lookups, if there are more than a few.

        Args:
            decided: seconds, by the clock.
        """
        self._decided = decided if num_rows > FEW else 0.0
        self._set_price(num_rows)

    def clock(self, planned: float, is_plain: bool) -> None:
        """Take on what planning the last round took, in which rows were asked about.

        Args:
            planned: seconds, those for indices among them.
            is_plain: whether nothing came of it, and nothing else is drafted.
        """
        if self._num_rows <= FEW:
            took = (CLOCKED_PLAIN if is_plain else CLOCKED) * (planned - self._indexing)
            ratio = min(max(1.0, took / _asking(self._num_rows)), MOST_ASKING)  # 1 of a clock that tells no number
            self._slower += CLOCK_STEP * (ratio - self._slower)
            self._set_price(self._num_rows)

    def _set_price(self, num_rows: int) -> None:
        slower = self._slower if num_rows <= FEW else 1.0
        self._asking = max(slower * _asking(num_rows) + _ending(num_rows), self._decided) / num_rows

    def begin(
        self, rows: Sequence[RowState], worth: Worth, usual: float, hopes: Hope = Hope.SOME
    ) -> Sequence[RowState]:
        """The rows of a round that begins, without guesses where they are not looked up; empty where none are.

        Args:
            usual: tokens per second of all rows without.
            hopes: of drafts after long matches; rows are asked about after those as far as there is any.
        """
        self.waits = False
        if len(rows) != self._num_rows:
            self._num_rows, self._can_pay = len(rows), len(rows) == 1 or could_pay(worth, usual)
            self._set_price(len(rows))
        if self._advance < 0:
            self._advance = worth.plain_seconds * sum([row.room for row in rows]) / len(rows)
            if len(rows) <= FEW:
                self._advance *= SAMPLED_ADVANCE if all(row.is_sampled for row in rows) else FEW_ADVANCE
            self._balance += SHARE * self._advance
        if not self._is_priced and len(rows) > FEW:
            return ()
        self._pays = SHARE * worth.plain_seconds
        if not self._is_on or not self._can_pay:
            # Guesses come with the next round's rows, once they can be paid for.
            self._is_on = self._can_pay and self._balance > self._to_begin(rows)
            return ()
        self._round += 1
        is_long = hopes is not Hope.NONE and max([row.match for row in rows]) >= GATE
        pays, debt = self._pays_now(rows), TRIAL * self._asking if len(rows) <= FEW else 0.0
        if self._balance < -debt:
            if not debt or self._pays < READ_SECONDS * len(rows):
                self._is_on = False
                return ()
            self._balance, self._wary = -debt, min(2 * self._wary, WARIEST)  # to watch few takes less than the share
            if hopes is not Hope.SURE:
                self._gate.shut()
        read, indexing = self._affordable(rows)
        if not self._is_on:
            return ()
        self._balance -= indexing
        self._gate.pass_rounds()
        if pays or not is_long:
            self._gate.forgive()
        self.waits = not pays and not (is_long and self._gate.is_open)
        self._indexing = indexing
        if self.waits:
            return ()
        self._balance -= self._asking * len(self._read)
        return read

    def _pays_now(self, rows: Sequence[RowState]) -> bool:
        """Whether rows may be asked about: of few, those that may not for a while are only watched.

        What they save meanwhile counts now and then, so that it is known for how long they are only watched.
        """
        if len(rows) > FEW:
            return self._balance >= 0
        if min(self._balance, self._least) < 0 or (self._least == 0 and self._balance < self._round_takes):
            self._least = self._to_begin(rows)
        if self._balance >= self._least and (not self._has_saved or self._round % COUNTED == 0):
            self._least, self._has_saved = 0.0, False
        return self._least <= 0 and self._balance >= 0

    def _to_begin(self, rows: Sequence[RowState]) -> float:
        """What the account must hold for rows to be asked about from now on."""
        indexing = [READ_SECONDS * (row.content_length - self._read.get(row.request_id, 0)) for row in rows]
        return self._trials(len(rows)) + min(indexing)

    def _trials(self, num_rows: int) -> float:
        """What it must hold for so many rows to be tried."""
        return (1 + self._wary * TRIAL * num_rows) * self._asking

    def _affordable(self, rows: Sequence[RowState]) -> tuple[Sequence[RowState], float]:
        """The rows, without guesses where nothing pays for an index; and seconds for the others' indices."""
        if len(rows) == 1 and (before := self._read.get(rows[0].request_id)) is not None:
            self._read = {rows[0].request_id: rows[0].content_length}
            return rows, READ_SECONDS * (rows[0].content_length - before)
        asking, read, known, left, indexing = self._asking, list[RowState](), dict[int, int](), self._balance, 0.0
        for row in rows:
            before = self._read.get(row.request_id)
            index = READ_SECONDS * (row.content_length - (before or 0))
            cost = index + (asking + (TRIAL * asking if before is None else 0.0) if len(rows) > FEW else 0.0)
            if before is None and cost > left:
                read.append(row._replace(guesses=None))
                continue
            if before is None:
                self._vain, self._has_saved = 0, False
                self._gate.open()
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
        if saved > 0:
            self._wary, self._has_saved = 1, self._least > 0
        most = max(self._balance, KEPT * num_rows * self._asking)
        self._balance = min(self._balance + SHARE * (seconds - paid) + saved, most)


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
