"""`Free`: what `Adaptive` drafts without any layer: from a row's own text, or a corpus."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.costs import Costs
from selfspec.control.crowd import Crowd
from selfspec.control.decider import Decider
from selfspec.control.finder import Finder
from selfspec.control.follower import Follower
from selfspec.control.plan import Plan, Steady
from selfspec.control.reading import FEW, FOLLOWED_PAUSE, Reading
from selfspec.control.rows import RowOutcome, RowState
from selfspec.control.timetable import AHEAD


class Free:
    """Rows that have their own texts alone to look in are followed; others are asked about as far as that pays.

    Args:
        decider: what drafts by layers are worth, and what was decided of them.
        most: longest draft; default: as long as it pays.
        drafts: where they may come from; nothing is planned unless "lookup" is among them.

    Attributes:
        follows: whether the round that was planned last is one of a single row that is followed.
        told_of: rows of that round of which it is to be told what guesses came to.
    """

    def __init__(self, costs: Costs, decider: Decider, most: int | None, drafts: Sequence[str]) -> None:
        self._decider, self._finder = decider, Finder(most, drafts)
        self._is_used = self._finder.looks_up
        self._follower, self._crowd = Follower(self._finder), Crowd(self._finder)
        self._reading = Reading(costs.ragged is not None)
        self.follows = False
        self._crowds = False  # the same of several rows
        self._will_ask = False  # whether the next round is the first whose rows come with guesses
        self.told_of: Sequence[RowState] = ()
        self._asks = False  # whether rows have more to look in than their own texts

    def is_on(self, num_rows: int) -> bool:
        """Whether so many rows may draft by lookup."""
        return self._is_used and (self._reading.is_on(num_rows) or self._may_follow(num_rows))

    def _may_follow(self, num_rows: int) -> bool:
        """Whether so many rows may be followed, as far as they have their own texts alone to look in."""
        return not self._asks and self._is_used and self._reading.knows(num_rows)

    def branches(self, num_rows: int) -> bool:
        """Whether branches may be drafted beside what is found of so many rows."""
        return (
            self._is_used
            and self._finder.branches
            and num_rows <= FEW
            and (num_rows <= 1 or not self._may_follow(num_rows))
        )

    def price(self, num_rows: int, deciding: float) -> None:
        """Something is decided anew; take on what deciding takes in a round of so many rows, in seconds."""
        self._reading.price(num_rows, deciding)

    def forget_rows(self) -> None:
        """All rows are gone, and the next ones may have their numbers."""
        self._finder.forget_rows()
        self._follower.forget_row()
        self._crowd.forget_rows()
        self._reading.forget_rows()
        self.forget_round()
        self._asks = False

    def forget_round(self) -> None:
        """A round begins, and may be planned by others."""
        self.follows, self._crowds, self._will_ask, self.told_of = False, False, False, ()

    def plan(self, rows: Sequence[RowState]) -> Plan | None:
        """Drafts of rows that are looked up, where that pays; asked once in a round that it may plan."""
        worth, decision = self._decider.worth, self._decider.decision
        if worth is None or not self._is_used:
            return None
        usual = self._decider.usual(len(rows))
        guesses = rows[0].guesses
        if guesses is not None:
            self._asks = not guesses.is_own
        self._will_ask = guesses is None and self.is_on(len(rows))
        if len(rows) == 1 and guesses is None and not self._asks:
            return None  # they come with the next round
        if len(rows) == 1 and not self._asks:
            self.follows = self._reading.may_follow(rows[0], worth)
            drafts = decision.exit_layer is not None
            found = self._follower.plan(rows[0], worth, usual, drafts) if self.follows else None
            self.told_of = rows if self.follows and self._follower.wants_looks else ()
            return found
        if guesses is not None and self._may_follow(len(rows)):
            self._crowds = True
            return self._crowd.plan(rows, worth, usual)
        read = self.told_of = self._reading.begin(rows, worth, decision.usual)
        if not read:
            return None
        found = self._finder.plan(read, worth, usual)
        self._reading.note(found is not None)
        return found

    @property
    def is_followed(self) -> bool:
        """Whether matches alone say what the rows of the round that was planned last draft by lookup."""
        return self.follows or self._crowds

    def steady(self, most: Steady) -> Steady:
        """How many rounds after the last one are likely to be as `most.usual`, or drafted by matches alone."""
        if self.follows:
            return self._follower.steady(most)
        if self._crowds:
            return self._crowd.steady(most)
        if self._will_ask:
            return Steady()
        return self._finder.steady(self.told_of, most) if self.told_of else most._replace(usual=None)

    @property
    def pause(self) -> int:
        """Plain rounds to pass over after one that found nothing better."""
        if self.follows:
            return FOLLOWED_PAUSE
        if self._crowds:
            return min(FOLLOWED_PAUSE, self._crowd.rounds_left)
        return self._reading.pause if self.told_of else AHEAD

    def keep_until(self, num_rounds: int) -> None:
        """After so many rounds a call ends for something else, unless rows are looked up meanwhile."""
        if self._crowds:
            self._crowd.keep_until(num_rounds)

    def match_of(self, row: RowState) -> int:
        """Of the row that is followed; 0 where none is, since to ask for it makes an index."""
        return row.match if self.follows else 0

    def is_quiet(self, row: RowState, match: int) -> bool:
        """Whether nothing comes of such a match of the row that is followed."""
        return not self.follows or self._follower.is_quiet(row, match)

    def pass_quiet(self, match: int) -> None:
        """A round was planned as the one before, since nothing comes of this match."""
        if self.follows:
            self._follower.pass_quiet(match)

    def pass_plain(self, num_rounds: int, num_rows: int) -> None:
        """Count plain rounds that nobody asked about."""
        if not self._is_used:
            return
        self._finder.pass_time(num_rounds)
        self._follower.pass_plain(num_rounds)
        if self._crowds:
            self._crowd.pass_rounds(num_rounds)
            return
        if self._decider.worth is not None and not self.follows:
            self._reading.pass_round(num_rows, num_rounds * self._decider.worth.plain_seconds, 0.0)

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome]) -> None:
        """What came of a round."""
        decider, finder = self._decider, self._finder
        if not self._is_used:
            return
        if self.follows and len(outcomes) == 1:
            self._follower.learn(plan, outcomes[0])
            return
        self._follower.pass_others(bool(self.told_of))
        if self._crowds:
            self._crowd.learn(plan, outcomes)
            return
        if len(outcomes) > 1 and not self._reading.can_pay and decider.worth is not None:
            self._reading.pass_round(len(outcomes), decider.worth.plain_seconds, 0.0)
            return  # nothing is looked up, or will be for so many rows
        if self.told_of:
            finder.observe(plan, outcomes)
        elif outcomes:
            finder.pass_time(sum([outcome.num_emitted for outcome in outcomes]) / len(outcomes))
        if decider.worth is not None:
            usual, rounds = decider.usual(len(outcomes)), decider.decision.rounds
            self._reading.count(plan, outcomes, decider.worth, usual, rounds)
