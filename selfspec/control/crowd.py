"""`Crowd`: the rows of a batch that have their own texts alone to look in, followed by a table of every row's matches.

To weigh each round takes the interpreter as long as a small model takes for a token. By a table a round's drafts follow
from the rows' matches alone, so that rounds by lookup go on inside compiled calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from selfspec.control.finder import Finder
from selfspec.control.lengths import ENDING, FIRST_KEPT, KEPT, MOST_KEPT, SAME, SHORTEST, WEIGHING
from selfspec.control.matches import LEAST, LONG, MOST_FOUND, bin_of
from selfspec.control.pieces import MOST_PACKED
from selfspec.control.plan import LOOKUP, Lookups, Plan, Steady
from selfspec.control.reading import FOLLOW_SHARE, READ_SECONDS
from selfspec.control.rows import RowOutcome, RowState
from selfspec.control.trust import Trust
from selfspec.control.worth import Worth

# Of the interpreter, on cold caches: to weigh what rows draft, and for each of them.
WEIGH_SECONDS, WEIGH_ROW = 2e-4, 5e-5
# By match, longer ones as the last, where in `SHORTEST`: what is drafted after a bin's shortest is after all of it.
AFTER = [0, *[1 + bin_of(match) for match in range(1, LONG + 1)]]
# What was weighed is kept for up to so much longer where a call then ends for something else, and for so much less long
# where rows come or go: every call that ends is followed by one on cold caches.
SOON = 0.25
TYPICAL = 8  # tokens drafted by a row in rounds by which a token more is priced
Line = tuple[tuple[int, ...], tuple[float, ...]]  # of a row, by match: tokens, and those likely to be right
NOTHING: Line = (0,) * (LONG + 1), (0.0,) * (LONG + 1)


class Crowd:
    """Plans rounds of several rows, which may come and go.

    Args:
        finder: what is known of matches.
    """

    def __init__(self, finder: Finder) -> None:
        self._finder, self._trust = finder, Trust(finder.passed)
        self._lines: dict[tuple[int, int], Line] = {}  # by row, see `RowState.whole`
        self._lookups: Lookups | None = None  # of the rows of the round that was planned last
        self._rows: list[tuple[int, int]] = []  # whose those are
        self._usual = self._each = 0.0  # per row, when that was weighed; and chances below which no token is drafted
        self._left, self._kept = 0, FIRST_KEPT // 2  # rounds, and for how many what was weighed is kept at least
        self._held, self._more = 0, 0.0  # for how many it was when that was weighed, and how many it yet may be beyond
        self._has_drafted = False  # since
        self._could_pay = False  # if every draft was right; else nobody looks into the rows' texts
        self._read: set[tuple[int, int]] = set()  # rows whose indices are made: to ask for a match makes one
        self._are_read: list[bool] = []  # of `_rows`
        self._count = 0  # rows that the lines are for, at most
        self._forecast = 0.0  # tokens of the round that was planned last, if lookup drafts in it

    def plan(self, rows: Sequence[RowState], worth: Worth, usual: float) -> Plan | None:
        """A round of rows with guesses from their own texts; None where drafts of those promise less than usual.

        Args:
            usual: tokens per second of all rows.
        """
        self._left -= 1
        each = usual / len(rows)
        are_others = [row.whole for row in rows] != self._rows
        is_old = self._left < (SOON * self._held if are_others else 0)
        if is_old or abs(each - self._usual) > SAME * self._usual:
            self._weigh(rows, worth, each)
        elif are_others:
            self._tell(rows, worth)
        self._forecast = 0.0
        lookups = self._lookups
        if lookups is None:
            return None
        matches = [row.match if is_read else 0 for row, is_read in zip(rows, self._are_read, strict=True)]
        lengths = lookups.drafted(matches, [row.room - 1 for row in rows])
        if lengths is None:
            return None
        self._has_drafted = True
        gains = zip(lookups.gains, matches, lengths, strict=True)
        self._forecast = len(rows) + sum([gain[min(match, LONG)] for gain, match, n in gains if n])
        seconds = worth.lookups()
        rate = self._trust.ratio * self._forecast / seconds[min(sum(lengths), len(seconds) - 1)]
        return Plan(LOOKUP, lengths, speedup=rate * worth.plain_seconds / len(rows))

    def forget_rows(self) -> None:
        """The next rows are others, whatever their numbers."""
        self._rows, self._are_read = [], []
        self._lines.clear()
        self._read.clear()

    def steady(self, most: Steady) -> Steady:
        """How many rounds after one that was just planned are drafted by matches alone."""
        rounds = min(most.num_rounds, self.rounds_left)
        longer = min(most.longer, self.rounds_left - rounds)
        return most._replace(num_rounds=rounds, longer=longer, lookups=self._lookups)

    @property
    def rounds_left(self) -> int:
        """Rounds after this one for which what is known is kept."""
        return max(0, self._left)

    def keep_until(self, num_rounds: int) -> None:
        """After so many rounds a call ends for something else: what is known is kept as long, if that is soon after."""
        longer = num_rounds - self._left
        if 0 < longer <= self._more:
            self._left, self._more = num_rounds, self._more - longer

    def learn(self, plan: Plan, outcomes: Sequence[RowOutcome]) -> None:
        """What came of a round."""
        count = len(outcomes)
        emitted = sum([outcome.num_emitted for outcome in outcomes]) / count
        self._finder.pass_time(emitted)
        if plan.exit_layer == LOOKUP and self._forecast:
            self._trust.add(emitted, self._forecast / count)

    def pass_rounds(self, num_rounds: int) -> None:
        """Count plain rounds that nobody asked about."""
        self._left -= num_rounds

    def _weigh(self, rows: Sequence[RowState], worth: Worth, usual: float) -> None:
        """Take on what came after matches in the rows' texts, and what that makes their drafts worth."""
        self._kept = KEPT if self._has_drafted else min(2 * self._kept, MOST_KEPT)
        takes = WEIGH_SECONDS + WEIGH_ROW * len(rows) + ENDING
        to_pay = math.ceil(takes / (WEIGHING * worth.plain_seconds))
        self._left = self._held = max(self._kept, min(to_pay, MOST_KEPT))
        self._more = SOON * self._held
        self._has_drafted, self._usual = False, usual
        seconds, count = worth.lookups(), len(rows)
        self._could_pay = any(count + n > usual * count * taken for n, taken in enumerate(seconds))
        typical = min(TYPICAL * count, len(seconds) - 1)
        self._each = usual * count * (seconds[typical] - seconds[1]) / max(1, typical - 1) / self._trust.ratio
        self._lines.clear()
        self._count = count
        self._finder.matches.keep_rows([row.request_id for row in rows])
        self._tell(rows, worth)

    def _tell(self, rows: Sequence[RowState], worth: Worth) -> None:
        """These are the rows now."""
        self._rows, count = [row.whole for row in rows], len(rows)
        if not self._could_pay:
            self._lookups = None
            return
        if count > self._count:  # of more rows each drafts less
            self._lines.clear()
        known, self._count = self._lines, max(count, self._count)
        self._read_more(rows, worth)
        self._are_read = [row in self._read for row in self._rows]
        for row, is_read in zip(rows, self._are_read, strict=True):
            if is_read and row.whole not in known and row.guesses is not None:
                self._finder.matches.take(row.guesses.take_tally(), row.request_id)
        self._lines = lines = {row.whole: known.get(row.whole) or self._line(row) for row in rows}
        if not any(any(lengths) for lengths, _ in lines.values()):
            self._lookups = None
            return
        usual = self._usual * count / self._trust.ratio
        needs = tuple([usual * taken - count for taken in worth.lookups()])
        ordered = [lines[row] for row in self._rows]
        self._lookups = Lookups(tuple([n for n, _ in ordered]), tuple([gain for _, gain in ordered]), needs)

    def _read_more(self, rows: Sequence[RowState], worth: Worth) -> None:
        """Indices of other rows are made, each if it takes little beside the row's share of the forwards to come."""
        self._read.intersection_update(self._rows)
        each = FOLLOW_SHARE * worth.plain_seconds / len(rows)
        for row in rows:
            takes = READ_SECONDS * (row.content_length + row.room)
            if row.whole not in self._read and takes <= each * row.room:
                self._read.add(row.whole)
                self._lines.pop(row.whole, None)  # which was that of a row that is not looked up

    def _line(self, row: RowState) -> Line:
        """What a row drafts after matches of 0, 1, 2, .. tokens."""
        if row.whole not in self._read:
            return NOTHING
        right = self._finder.matches.rights(row.request_id)
        most, least = min(self._finder.most, MOST_FOUND, MOST_PACKED // self._count), max(LEAST, self._each)
        drafts = [(0, 0.0), *[_draft(right, shortest, most, least) for shortest in SHORTEST[1:]]]
        lengths, gains = zip(*[drafts[at] for at in AFTER], strict=True)
        return lengths, gains


def _draft(right: Sequence[float], match: int, most: int, least: float) -> tuple[int, float]:
    """Tokens that are as likely as `least`, and how many of them are likely to be right, after such a match."""
    count, chance, gain = 0, right[bin_of(match)], 0.0
    while chance >= least and count < most:
        count, gain, match = count + 1, gain + chance, match + 1
        chance *= right[bin_of(match)]
    return count, gain
