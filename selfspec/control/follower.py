"""`Follower`: a single row that has its own text alone to look in, followed by a table of its matches.

All that rounds need to know is how long a draft is after how long a match, and that is weighed now and then by what the
row's index tells of the tokens that came. So nobody asks in between, rounds by lookup go on inside compiled calls, and
what never pays costs little.
"""

from __future__ import annotations

from typing import NamedTuple

from selfspec.control.finder import Finder
from selfspec.control.lengths import SHORTEST, Lengths
from selfspec.control.matches import LONG, bin_of
from selfspec.control.plan import LOOKUP, Plan, Steady, TokenTree
from selfspec.control.rows import Looked, RowOutcome, RowState
from selfspec.control.weighing import Weighing
from selfspec.control.worth import Worth

BINS = (0, *[1 + bin_of(match) for match in range(1, SHORTEST[-1] + 1)])  # by match: which of `SHORTEST` it counts as


class Drafts(NamedTuple):
    """What is drafted after matches of 0, 1, 2, .. tokens, and more, as the last; see `Steady`."""

    lengths: tuple[int, ...]
    branches: tuple[bool, ...]
    grown: tuple[int, ...]


class Follower:
    """Plans rounds of a row, one after another; several rows may be followed in turns.

    Args:
        finder: what is known of matches, and who plans drafts that may branch.

    Attributes:
        wants_looks: whether it is to be told what guesses came to in the round that was planned last: where drafts may
            branch.
    """

    def __init__(self, finder: Finder) -> None:
        self._finder, self._weighing, self._lengths = finder, Weighing(finder), Lengths()
        self._drafts: Drafts | None = None  # as far as anybody asked
        self._match = 0  # before the round that was planned last
        self._forecast = 0.0  # tokens of that, if lookup drafts as many as were weighed
        self._streak = 0  # drafts after long matches in a row that were right as a whole
        self._row = -1, 0  # that is followed, see `RowState.whole`
        self._has_told = False  # whether what came of it since was told elsewhere, too
        self.wants_looks = False

    def plan(self, row: RowState, worth: Worth, usual: float, beside_layers: bool) -> Plan | None:
        """A round of a row with guesses from its own text; None where drafts of that promise less than usual.

        Args:
            usual: tokens per second.
            beside_layers: whether that is what drafts by layers come to.
        """
        guesses, finder = row.guesses, self._finder
        assert guesses is not None
        match = self._match = row.match
        self.wants_looks = False
        is_other = row.whole != self._row
        if is_other:
            self._row, self._streak = row.whole, 0
        if self._lengths.is_due(row, usual, beside_layers, worth.plain_seconds):
            self._weigh_all(row, worth, usual)
        elif is_other:
            self._count(row)
        known = self._lengths.after(match)
        if known.may_branch and guesses.alternatives():
            self.wants_looks = True
            found = finder.plan_by_guesses([row], [match], worth, usual)
            if found is not None:
                self._forecast = finder.forecast
                self._lengths.note()
            return found
        length = min(known.after(self._streak) if match >= LONG else known.length, row.room - 1)
        if length <= 0:
            return None
        self._lengths.note()
        self._forecast = known.forecast if length == known.length else 0.0
        tokens = tuple(guesses.chain(length))
        tree = TokenTree(tokens, tuple(range(len(tokens))))
        return Plan(LOOKUP, (len(tokens),), trees=(tree,), speedup=known.promised * worth.plain_seconds)

    def forget_row(self) -> None:
        """The next row is another one, whatever its number."""
        self._row, self._streak = (-1, 0), 0
        self._lengths.forget_row()

    def is_quiet(self, row: RowState, match: int) -> bool:
        """Whether nothing comes of such a match of the row that is followed, as long as what was weighed is kept."""
        one = self._lengths.after(match)
        return not (one.length or one.may_branch or self._lengths.is_surprised(row))

    def pass_quiet(self, match: int) -> None:
        """A round of the row that is followed was planned as the one before, since such a match is quiet."""
        self._match = match
        self._lengths.pass_rounds()

    def steady(self, most: Steady) -> Steady:
        """For how many rounds after one that was just planned what is drafted depends on matches alone.

        Args:
            most: those that there may be.
        """
        drafts = self._drafts
        if drafts is None:
            drafts = self._drafts = self._drafts_now()
        return most._replace(
            lengths=drafts.lengths,
            branches=drafts.branches,
            grown=drafts.grown if drafts.lengths[-1] > 0 else (),
            streak=self._streak,
            kept=self._lengths.rounds_left,
            most_surprises=self._lengths.most_surprises,
        )

    def _drafts_now(self) -> Drafts:
        known = self._lengths.all
        after = [known[n] for n in BINS]
        return Drafts(tuple([one.length for one in after]), tuple([one.may_branch for one in after]), known[-1].grown)

    def learn(self, plan: Plan, outcome: RowOutcome) -> None:
        """What came of a round of the row that is followed."""
        emitted, looked = outcome.num_emitted, outcome.looked
        is_found, is_right = plan.exit_layer == LOOKUP, 0 < outcome.num_drafted == outcome.num_accepted
        if is_found and looked is None:
            looked = Looked(self._match, outcome.num_drafted, outcome.num_accepted)
        if looked is not None and looked.match:
            self._finder.matches.add(looked, outcome.request_id, is_tallied=True)
        if looked is not None and looked.rank is not None:
            self._finder.ranks.add(looked.rank)
        self._finder.matches.keep_rows([outcome.request_id])
        self._finder.pass_time(emitted)
        self._streak = self._streak + 1 if is_found and is_right and self._match >= LONG else 0
        if is_found and not self._streak:
            self._lengths.note_told()
        if is_found and self._forecast:
            self._finder.trust_after(self._match).add(emitted, self._forecast)

    def pass_others(self, are_told: bool) -> None:
        """A round was not its to plan.

        Args:
            are_told: whether what guesses came to in it is counted elsewhere.
        """
        self._streak, self._has_told = 0, self._has_told or are_told

    def pass_plain(self, num_rounds: int) -> None:
        """Count plain rounds that nobody asked about."""
        self._streak = 0
        self._lengths.pass_rounds(num_rounds)

    def _count(self, row: RowState) -> None:
        """Take on what came after matches in its text."""
        assert row.guesses is not None
        tally, matches = row.guesses.take_tally(), self._finder.matches
        if not (self._has_told and matches.knows(row.request_id)):  # else it would count twice
            matches.take(tally, row.request_id)
        self._has_told = False

    def _weigh_all(self, row: RowState, worth: Worth, usual: float) -> None:
        self._count(row)
        self._lengths.keep(self._weighing.all(row.request_id, worth, usual))
        self._drafts = None
