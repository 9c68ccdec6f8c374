"""`Deciding`: when something is decided anew, and what comes of that in the rounds that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence

from selfspec.control.decider import TRY_ROUNDS, Decider
from selfspec.control.experience import Experience
from selfspec.control.free import Free
from selfspec.control.kinds import block_of, rounds_apart
from selfspec.control.looks import Looks
from selfspec.control.rows import RowState
from selfspec.control.timetable import DECIDING, IDLE_ROUNDS, Timetable
from selfspec.control.trials import Trials

# A decision holds as long as no larger share of its rows has left (of up to `SMALL` rows, and of more) or joined; and
# where all that is left to come takes no longer than `SOON_DONE`, since another would take a fifth of that.
LEFT, SMALL, JOINED, SOON_DONE = (0.25, 0.49), 8, 0.25, 5 * DECIDING


class Deciding:
    """Has a `Decider` choose where rows joined or left, or where a timetable says so, and sets looks, trials and that
    timetable by what it chose.

    Args:
        exit_layers: those to choose from; none where no layer drafts.
        most: tokens that a row may draft.

    Attributes:
        batch: rows at the last decision.
    """

    def __init__(
        self,
        decider: Decider,
        experience: Experience,
        free: Free,
        looks: Looks,
        times: Timetable,
        trials: Trials,
        exit_layers: Sequence[int],
        most: int,
    ) -> None:
        self._decider, self._experience, self._free = decider, experience, free
        self._looks, self._times, self._trials = looks, times, trials
        self._allowed, self._most = exit_layers, most
        self.batch = self._fewest = 0  # the latter: the fewest since
        self._processes = False  # whether any row has processors
        self._are_others = False  # whether rows were forgotten since a round began

    def forget_rows(self) -> None:
        """All rows are gone, and the next ones may have their numbers."""
        self._are_others = True

    def begin(self, rows: Sequence[RowState]) -> None:
        """A round of these rows begins: decide, if that is due."""
        processes = True in [row.has_processors for row in rows]
        self._fewest = min(self._fewest, len(rows))
        are_more = len(rows) - self._fewest > JOINED * self.batch
        have_left = self.batch - len(rows) > LEFT[self.batch > SMALL] * self.batch
        are_fewer = have_left and (self._are_others or not self._are_soon_done(rows))
        self._are_others = False
        if self._times.is_due or are_fewer or are_more or processes != self._processes:
            self._processes = processes
            self._decide(rows)

    def _are_soon_done(self, rows: Sequence[RowState]) -> bool:
        """Whether what is left of fewer rows than something was decided for is not worth another decision."""
        worth = self._decider.worth
        return worth is not None and worth.plain_seconds * max([row.room for row in rows]) <= SOON_DONE

    def _decide(self, rows: Sequence[RowState]) -> None:
        decider, times, num_rows = self._decider, self._times, len(rows)
        goes_on = self._trials.trying > 0 and num_rows.bit_length() == decider.num_rows.bit_length()
        worth, deciding = decider.price(rows)
        self._free.price(num_rows, deciding)
        self.batch = self._fewest = num_rows
        times.decide_after(IDLE_ROUNDS)
        rooms = [row.room for row in rows]
        seconds_left, in_step = worth.plain_seconds * max(rooms), num_rows - len(set(rooms))
        self._looks.begin(seconds_left, worth.plain_seconds)
        if not self._allowed or self._looks.are_awaited:
            decider.be_plain()
            return
        before = decider.decision.exit_layer
        self._trials.decide(decider.decide(self._processes, seconds_left, in_step), goes_on)
        if decider.decision.exit_layer is not None:
            self._begin_drafts(num_rows, worth.plain_seconds, before is None, goes_on)

    def _begin_drafts(self, num_rows: int, plain_seconds: float, begins: bool, goes_on: bool) -> None:
        """Layers draft: when that is decided anew, and how many plain rounds come before, to hold drafts against."""
        times, trials, decision = self._times, self._trials, self._decider.decision
        longest_round = decision.rounds[min(self._most, math.ceil(decision.length))]
        times.decide_while_drafting(num_rows, begins, decision.is_known, longest_round)
        apart = rounds_apart(decision.speedup, longest_round / plain_seconds, block_of(num_rows).rounds)
        begins_try = trials.trying > 0 and not goes_on
        if begins_try or self._experience.pace.kinds.wants_plain(apart):
            trials.compare(num_rows, anew=begins_try)
        if trials.trying:
            times.decide_after(trials.block + trials.trying)

    def try_again(self) -> bool:
        """Whether drafts are tried where their layer would be looked at; looks pay for that."""
        decider = self._decider
        if self._looks.are_awaited or not decider.try_again(self._processes):
            return False
        self._looks.pay(decider.lost_by_trying)
        self._trials.decide(is_tried=True, goes_on=False)
        self._times.decide_after(TRY_ROUNDS)
        return True
