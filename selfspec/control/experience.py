"""`Experience`: what rounds have shown of drafts, of forecasts and of the clock.

Rounds are put on record as they come and counted together, when somebody asks: between two rounds the weights of the
model stream through the processor's caches, so that a function called once a round takes several times as long as one
called for a dozen of them in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from selfspec.control.agreement import Agreement
from selfspec.control.costs import Costs
from selfspec.control.fading import Passed
from selfspec.control.laps import Seconds
from selfspec.control.pace import Pace
from selfspec.control.plan import LOOKUP, Plan, confidence_bins
from selfspec.control.rows import RowOutcome
from selfspec.control.second_choices import SecondRates
from selfspec.control.tracker import Floats, Tracker
from selfspec.control.trust import Trust

KNOWN = 12.0  # lasting picks from which on a layer is known: misses of its copies are not held against it
MOST_RECORDED = 32  # rounds; then they are counted, asked or not
# Rows of a batch whose drafts are counted in every round; of more rows, as many of them in fewer rounds: it is the
# tokens that tell, and they take the interpreter as long as a small model takes for a layer.
COUNTED_ROWS = 6


# A round: its plan, what became of it, its clock, which goes on until the round has ended, how many idle rounds went
# before it, and `Experience.add`'s `looked`.
_Recorded = tuple[Plan, Sequence[RowOutcome], Seconds, int, tuple[float, float] | None]


class Experience:
    """The tracker of all layers, rates of second choices, trust in forecasts, and the clock's pace.

    Args:
        prior: what `state` of an earlier one of the same model returned.
        has_seconds: whether second choices are drafted.
    """

    def __init__(self, costs: Costs, prior: Any, has_seconds: bool) -> None:
        self._costs, self._tracker = costs, Tracker(costs.num_layers, prior)
        self._second_rates = SecondRates(costs.num_layers) if has_seconds else None
        self._passed = Passed()
        self._agreement = Agreement(costs.num_layers, self._passed, (prior or {}).get("agreement"))
        self._covered = 1.0  # how much less right than the layers the plans' calibration takes a draft to be
        self._trust = Trust(self._passed)  # in forecasts of rounds that layers drafted in
        self._trust_in_known = Trust(self._passed)  # the same of layers that were known then
        self._pace = Pace(costs, (prior or {}).get("pace"))
        self._recorded: list[_Recorded] = []
        self._num_idle = self._uncounted = 0
        self._rate, self._rounds = 0.0, [0.0]
        self._is_known = self._are_copies_known = False  # when that was forecast

    @property
    def tracker(self) -> Tracker:
        self._count()
        return self._tracker

    def has_seen(self, exit_layers: Sequence[int]) -> bool:
        """Whether any of these layers is known; what nobody ever looked at, no earlier text tells of."""
        return any(self._tracker.num_lasting(layer) >= KNOWN for layer in exit_layers)

    def num_counted(self, exit_layer: int) -> float:
        """Lasting picks of a layer in rounds that are counted already."""
        return float(self._tracker.num_lasting(exit_layer))

    @property
    def second_rates(self) -> SecondRates | None:
        self._count()
        return self._second_rates

    @property
    def agreement(self) -> Agreement:
        """How often copies are right where the layers would be."""
        self._count()
        return self._agreement

    def trusts(self) -> Floats:
        """`[L - 1]`: how far forecasts for layers like each came true, for those that are known or for all. That one
        did not do what next to nothing told of it says how good others are that nobody knows, not what is known."""
        is_known = self.tracker.lasting.sum((0, 2)) >= KNOWN
        return np.where(is_known, self._trust_in_known.ratio, self._trust.ratio)

    @property
    def pace(self) -> Pace:
        self._count()
        return self._pace

    def state(self) -> dict[str, Any]:
        """Plain numbers to start a later one from."""
        return self.tracker.state() | {"agreement": self._agreement.state(), "pace": self._pace.state()}

    def tell_pace(self, prior: Any) -> None:
        """Start from what `Pace.state` of an earlier one returned."""
        self._pace = Pace(self._costs, prior)

    def expect(self, exit_layer: int, rate: float, rounds: Sequence[float], covered: float = 1.0) -> None:
        """Rounds that this layer drafts in are from now on forecast to bring so many tokens per second and row.

        Args:
            rounds: their seconds, by drafted tokens per row.
            covered: by what their plans' calibration is less than how often the layer is right.
        """
        self._count()
        self._rate, self._rounds, self._covered = rate, list(rounds), covered
        self._is_known = self._tracker.num_lasting(exit_layer) >= KNOWN
        self._are_copies_known = self._agreement.is_known

    def add_idle(self, num_rounds: int = 1) -> None:
        """Plain rounds that nothing but their tokens is to be said of."""
        self._num_idle += num_rounds

    def add(
        self,
        plan: Plan,
        outcomes: Sequence[RowOutcome],
        seconds: Seconds,
        looked: tuple[float, float] | None,
    ) -> None:
        """Put a round on record.

        Args:
            looked: to set its clock beside the table of costs, the tokens of its rows, see `Costs.context_of`, and the
                share of the vocabulary that it drafted over.
        """
        if len(self._recorded) >= MOST_RECORDED:
            self._count()
        self._recorded.append((plan, outcomes, seconds, self._num_idle, looked))
        self._num_idle = 0

    def _count(self) -> None:
        if self._recorded:
            recorded, self._recorded = self._recorded, []
            for one in recorded:
                self._count_round(one)

    def _count_round(self, recorded: _Recorded) -> None:
        plan, outcomes, seconds, num_idle, looked = recorded
        exit_layer, rows = plan.exit_layer, max(1, len(outcomes))
        emitted = sum([outcome.num_emitted for outcome in outcomes]) / rows
        self._uncounted += 1
        if exit_layer and COUNTED_ROWS * self._uncounted >= rows:
            self._uncounted = 0
            self._count_drafts(plan, exit_layer, outcomes)
        for outcome in outcomes if plan.shadow is not None else ():
            if outcome.shadow is not None:
                self._tracker.add_shadow(outcome.shadow)
        self._tracker.pass_time(emitted + num_idle)
        if self._second_rates is not None:
            self._second_rates.pass_time(emitted)
        self._passed.tokens += emitted + num_idle
        if exit_layer:
            self._hold_to_forecast(plan, outcomes, emitted)
        around = None if exit_layer is None else seconds.rest
        self._pace.pass_round(seconds.decided or seconds.control, num_idle, around, rows)
        if looked is not None:
            copies, (context, share) = plan.draft_bits is not None, looked
            lengths, beside = [o.num_drafted for o in outcomes], [o.num_beside for o in outcomes]
            beside = beside if any(beside) else []
            expected = self._costs.stages(exit_layer, lengths, context, beside, share, copies)
            if exit_layer == LOOKUP and rows > 1 and self._costs.ragged is not None:
                expected["verify"] *= max(1.0, self._costs.ragged(rows))
            self._pace.look(exit_layer, rows, expected, seconds, copies)

    def _hold_to_forecast(self, plan: Plan, outcomes: Sequence[RowOutcome], came: float) -> None:
        """What copies get wrong that the layers would have had right says nothing of forecasts for layers that are
        known, unless copies were known, too, when it was forecast; of others it says enough that what little is known
        of them promised too much."""
        rounds, longest = self._rounds, max([outcome.num_drafted for outcome in outcomes])
        forecast = self._rate * rounds[min(len(rounds) - 1, longest)]  # by the table
        tells, is_known = plan.draft_bits is None or self._are_copies_known, self._is_known
        if tells or not is_known:
            self._trust.add(came, forecast)
        if tells and is_known:
            self._trust_in_known.add(came, forecast)

    def _count_drafts(self, plan: Plan, exit_layer: int, outcomes: Sequence[RowOutcome]) -> None:
        """Every drafted token that was judged is a hit of the layer or a miss, and every second choice beside one."""
        judged: list[tuple[int, Sequence[float]]] = []  # how many were right, and the confidences of these and of one
        for outcome in outcomes:
            accepted = outcome.num_accepted
            # What no draft could have picked says nothing of the layer: it is in the part's coverage.
            count = accepted if outcome.is_left_out else outcome.num_judged
            judged.append((accepted, outcome.confidences[:count]))
            if outcome.second is not None and self._second_rates is not None:
                self._second_rates.add(exit_layer, outcome.confidences[accepted], outcome.second)
        if plan.draft_bits is not None and (self._is_known or self._tracker.num_lasting(exit_layer) >= KNOWN):
            # So much is known, or was when the layer was chosen, that misses are rather the copies'.
            if plan.stop is not None:
                calibration, told = plan.stop.calibration, [one for _, confidences in judged for one in confidences]
                chances, right = sum([calibration[one] for one in confidence_bins(told)]), sum([n for n, _ in judged])
                if told:
                    self._agreement.add(exit_layer, right, chances / self._covered)
            if not self._agreement.is_good:
                return
        for right, confidences in judged:
            self._tracker.add_draft(exit_layer, right, confidences)
