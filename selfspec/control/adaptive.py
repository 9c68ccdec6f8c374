"""`Adaptive`, the default: the exit layer and draft lengths of most expected tokens per measured second, or none.

It joins what the literature keeps apart: shadow statistics of every layer (DEL, arXiv 2504.05598), a measured table of
costs with the head in it and goodput as the aim (SmartSpec, arXiv 2406.14066; Synergy, arXiv 2310.18813), confidence
calibrated into probability (SpecDec++, arXiv 2405.19715), and a batch whose slow rows do not hold up the others (DSDE,
arXiv 2509.01083).

In a round, rows draft on as long as one more token is worth its time: as long as the chance that all of a row's tokens
so far are right, in the mean over the rows, times the exit's acceptance, times the seconds a token is worth, exceeds
the seconds one more costs. That is the best moment to stop if tokens are independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from selfspec.control.costs import Costs
from selfspec.control.decider import Decider
from selfspec.control.deciding import Deciding
from selfspec.control.experience import Experience
from selfspec.control.free import Free
from selfspec.control.laps import Seconds
from selfspec.control.looks import Looks, waited_of
from selfspec.control.parts import Vocabulary
from selfspec.control.pieces import MOST
from selfspec.control.plan import DRAFTS, Plan, ShadowPlan, Steady
from selfspec.control.rows import RowOutcome, RowState, Shadow
from selfspec.control.seeding import Seeding
from selfspec.control.timetable import Timetable
from selfspec.control.tracker import Tracker
from selfspec.control.trials import Trials

LOOK_EVERY, EARLY_LOOKS = 8, 4  # rounds between looks at the clock, and the same of a single row's first rounds


class Adaptive:
    """Plans from a tracker's statistics and a machine's costs.

    Args:
        prior: what `state` of an earlier one of the same model returned.
        exit_layers: those to choose from; default: all.
        most: longest draft; default: as long as it pays.
        drafts: where they may come from, among `DRAFTS`.
    """

    def __init__(
        self,
        costs: Costs,
        prior: Any = None,
        exit_layers: Sequence[int] | None = None,
        most: int | None = None,
        drafts: Sequence[str] = DRAFTS,
    ) -> None:
        self.costs = costs
        self.most = MOST if most is None else min(most, MOST)
        self._allowed = list(exit_layers or range(1, costs.num_layers)) if "exit" in drafts else []
        self._experience = Experience(costs, prior, "tree" in drafts)
        has_prior = self._experience.has_seen(self._allowed)  # earlier texts have told of the layers
        self._decider = Decider(costs, self._experience, self._allowed, self.most)
        self._free = Free(costs, self._decider, most, drafts)
        self._may_copy = "copies" in drafts
        self._seeding = Seeding(costs, self._experience, self._decider, [] if has_prior else self._allowed)
        self._looks = Looks(costs, has_prior, waited_of(prior))
        self._times, self._trials = Timetable(has_prior), Trials()
        told = self._decider, self._experience, self._free, self._looks, self._times, self._trials
        self._deciding = Deciding(*told, self._allowed, self.most)
        self._held: Sequence[int] = (0,)  # tokens of each row of the round that was planned last
        self._idle = Plan(None, (0,), speedup=1.0)
        self._likely: Plan | None = None  # that of the next rounds which lookup does not draft, if it is known
        self._alike, self._alike_for = 0, 0  # rounds that will have the same plan, if nothing is found; of a request

    def forget_rows(self) -> None:
        """All rows are gone, and the next ones may have their numbers; what they told holds, as it does for later
        rows of one engine."""
        self._alike = 0
        self._deciding.forget_rows()
        self._free.forget_rows()
        self._experience.pace.begin_again()
        if self._experience.has_seen(self._allowed):
            self._times.tell_prior()

    @property
    def tracker(self) -> Tracker:
        """Statistics of all layers, with everything that came so far."""
        return self._experience.tracker

    def tell_vocabulary(self, vocabulary: Vocabulary | None) -> None:
        """Drafts may be over parts of this vocabulary; None: they are over all of it."""
        if self._decider.tell_vocabulary(vocabulary):
            self._forget_decision()

    def tell_copies(self, has_copies: bool) -> None:
        """Drafts may be written by copies of the layers in 4 bits; until this is told they may not."""
        if self._decider.tell_copies(has_copies and self._may_copy):
            self._forget_decision()

    def _forget_decision(self) -> None:
        self._times.decide_now()
        self._alike = 0
        self._seeding.forget()

    def tell_pace(self, pace: Any) -> None:
        """Start from what the clock told an earlier one with these costs, as its `state` has it, and no more of it."""
        self._experience.tell_pace(pace)

    def state(self) -> dict[str, Any]:
        """What it has seen, for a later one of the same model to start from."""
        return self._experience.state() | {"waited": self._looks.waited}

    @property
    def reads_lookup(self) -> bool:
        """Whether rows may draft by lookup, as far as that pays."""
        return self._free.is_on(self._deciding.batch)

    @property
    def hears_lookup(self) -> bool:
        """Whether what would have come of lookups in the round that was planned last is worth telling."""
        return bool(self._free.told_of)

    @property
    def reads_ranks(self) -> bool:
        """Whether branches may be drafted beside what lookup finds."""
        return self._free.branches(self._deciding.batch)

    @property
    def plain_ahead(self) -> int:
        """Rounds after the one that was planned last that will be plain, unless rows join or leave."""
        return self._times.ahead

    @property
    def steady(self) -> Steady:
        """How many of the next rounds are likely to be as the one that was planned last."""
        likely = self._likely
        if likely is not None and self._trials.is_in_block:
            return Steady(self._trials.block)
        if likely is None:
            return Steady()
        longer = max(0, min(self._times.may_put_off(self._deciding.batch), self._looks.rounds_left - self._next_alike))
        return self._free.steady(Steady(self._next_alike, usual=likely, longer=longer))

    @property
    def _next_alike(self) -> int:
        """Rounds to come before something is decided, or layers are looked at."""
        return min(self._times.until_due, self._looks.rounds_left)

    def pass_plain(self, num_rounds: int, seconds: float) -> None:
        """Count rounds of `plain_ahead` that nobody asked about.

        Args:
            seconds: of their forwards.
        """
        self._times.pass_ahead(num_rounds)
        self._trials.plain_run += num_rounds
        self._free.pass_plain(num_rounds, self._deciding.batch)
        self._experience.add_idle(num_rounds)
        self._looks.pass_idle(seconds, num_rounds)

    def seed_layers(self, row: RowState) -> tuple[int, ...]:
        """Those at which a prompt is looked at while it is read."""
        return self._seeding.layers(row, self._deciding.batch)

    def seed(self, row: RowState, shadow: Shadow) -> None:
        self.tracker.add_shadow(shadow)
        self._looks.take_seed(self.costs.seed(len(shadow.layers), shadow.hits.shape[1]))
        self._times.decide_now()
        self._alike = 0

    def plan(self, rows: Sequence[RowState]) -> Plan:
        if self._alike:
            self._alike -= 1
            row = rows[0]
            if len(rows) == 1 and row.request_id == self._alike_for and self._likely is not None:
                match = self._free.match_of(row)
                if self._is_alike(row, match):
                    self._pass_alike(row, match)
                    return self._likely
            self._alike = 0
        self._likely = None
        self._seeding.begin_round()
        self._free.forget_round()
        self._times.begin()
        self._deciding.begin(rows)
        if len(rows) != len(self._idle.draft_lengths):
            self._idle = Plan(None, (0,) * len(rows), speedup=1.0)
        self._held = [row.content_length for row in rows]
        self._looks.tell_room(max([row.room for row in rows]))
        if self._trials.begin():
            self._likely = self._idle
            return self._idle
        found = self._by_lookup(rows)
        if found is not None:
            return found
        if not self._looks.are_due:
            self._free.keep_until(self._next_alike)
        return self._without_lookup(rows)

    def _plan_alike(self, row: RowState) -> None:
        """The next rounds of a single row are likely to be planned as this one was."""
        self._alike_for = row.request_id
        if self._is_alike(row, self._free.match_of(row)):
            self._alike = self._next_alike

    def _is_alike(self, row: RowState, match: int) -> bool:
        """Whether a single row has room for the usual draft, and lookup finds nothing that would matter."""
        return row.room > self.most and self._free.is_quiet(row, match)

    def _pass_alike(self, row: RowState, match: int) -> None:
        """Count a round that is planned as the one before."""
        self._seeding.begin_round()
        self._times.begin()
        self._held = [row.content_length]
        self._looks.tell_room(row.room)
        self._free.pass_quiet(match)

    def _by_lookup(self, rows: Sequence[RowState]) -> Plan | None:
        """Drafts of rows that are looked up, where that pays."""
        found = self._free.plan(rows)
        if found is not None:
            self._times.put_off(self._deciding.batch)
            exit_layer = self._decider.decision.exit_layer
            if self._looks.are_due and self._decider.layers_to_see():
                if not self._free.is_followed:
                    return found  # no call goes on by lookup, and a round without comes to a look
                self._looks.put_off()
            self._likely = self._by_layers(rows) if exit_layer is not None else self._idle
        return found

    def _without_lookup(self, rows: Sequence[RowState]) -> Plan:
        """What was decided, by layers or without drafts; with a look at layers where one is due."""
        looks = self._looks.are_due and not self._deciding.try_again()
        exit_layer = self._decider.decision.exit_layer
        shadow = self._shadow(exit_layer, len(rows)) if looks else None
        if exit_layer is None:
            return self._without_drafts(len(rows), shadow)
        plan = self._by_layers(rows, shadow)
        if shadow is None and plan is not self._idle:
            self._likely = plan
            if len(rows) == 1 and not self.hears_lookup:
                self._plan_alike(rows[0])
        return plan

    def _without_drafts(self, num_rows: int, shadow: ShadowPlan | None) -> Plan:
        if shadow is not None:
            return Plan(None, self._idle.draft_lengths, shadow=shadow)
        if self._trials.is_settled(num_rows) and not self._times.has_clock:
            self._times.look_ahead(min(self._free.pause, self._looks.rounds_left))
        self._likely = self._idle
        return self._idle

    def _by_layers(self, rows: Sequence[RowState], shadow: ShadowPlan | None = None) -> Plan:
        """What was decided; nothing else changes between decisions."""
        most = min(self.most, self._decider.decision.most)
        lengths = tuple([min(most, row.room - 1) for row in rows])
        return self._decider.plan(lengths, shadow) if any(lengths) else self._idle

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: Seconds) -> None:
        trials = self._trials
        self._free.observe(plan, outcomes)
        trials.take(plan.exit_layer, self._deciding.batch)
        if plan.exit_layer is not None:
            self._times.note_draft()
        is_silent = not self._times.has_clock and not trials.tells
        if plan is self._idle and is_silent:  # common where a model should not draft
            self._experience.add_idle()
            self._looks.pass_idle(seconds.verify + seconds.head)
            return
        if plan.exit_layer is None and plan.shadow is not None:
            self._times.decide_now()
        if trials.has_told:
            self._decider.note_tried()
        every = EARLY_LOOKS if self._deciding.batch == 1 and self._times.is_early else LOOK_EVERY
        is_due = self._times.round % every == 0
        looks = trials.tells or (is_due and not trials.is_cold)
        looked = (self.costs.context_of(self._held), self._decider.share(plan.draft_vocab)) if looks else None
        self._experience.add(plan, outcomes, seconds, looked)
        self._looks.pass_round(None if plan.exit_layer is None else self._deciding.batch, self._times.is_early, seconds)

    def _shadow(self, exit_layer: int | None, num_rows: int) -> ShadowPlan | None:
        """At all layers that could pay; only called when earlier rounds have paid for it."""
        emitted = 1 if exit_layer is None else 1 + math.ceil(self._decider.decision.length)
        return self._looks.plan(self._decider.layers_to_see(), num_rows, emitted)
