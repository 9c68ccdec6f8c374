"""`Watch`: plain decoding that looks at every layer, to learn how often each would have been right."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.acceptance import Tracker
from selfspec.control.laps import Seconds
from selfspec.control.plan import Plan, Policy, ShadowPlan
from selfspec.control.rows import RowOutcome, RowState


class Watch(Policy):
    """Drafts nothing; its `tracker` sees what each layer would have picked at every position.

    That takes longer than any draft saves: it is for statistics that a model's later users start from.
    """

    def __init__(self, num_layers: int) -> None:
        self.tracker = Tracker(num_layers)
        self._layers = tuple(range(1, num_layers))

    def plan(self, rows: Sequence[RowState]) -> Plan:
        lengths, shadow = (0,) * len(rows), ShadowPlan(self._layers, tuple(range(len(rows))), 1)
        return Plan(None, lengths, shadow=shadow if self._layers else None)

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: Seconds) -> None:
        for outcome in outcomes:
            if outcome.shadow is not None:
                self.tracker.add_shadow(outcome.shadow)
        self.tracker.pass_time(1)
