"""`FiniteState`: draft one token more after success, one less after failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from selfspec.control.plan import Plan, Policy
from selfspec.control.rows import RoundOutcome, RowState


@dataclass(slots=True)
class FiniteState(Policy):
    """Each row's draft grows by one when all of it is accepted and shrinks by one otherwise.

    The baseline FS-LayerSkip of DEL (arXiv 2504.05598). It never drafts less than one token: from none, it could not
    grow again.
    """

    exit_layer: int
    num_draft_tokens: int  # in a row's first round
    most: int = 18
    _lengths: dict[int, int] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: Sequence[RowState]) -> Plan:
        first = max(1, min(self.num_draft_tokens, self.most))
        self._lengths = {row.request_id: self._lengths.get(row.request_id, first) for row in rows}
        lengths = tuple(min(self._lengths[row.request_id], row.room - 1) for row in rows)
        return Plan(self.exit_layer if any(lengths) else None, lengths)

    def observe(self, plan: Plan, rounds: Sequence[RoundOutcome]) -> None:
        for outcome in (row for round_ in rounds for row in round_.rows):
            length = self._lengths.get(outcome.request_id)
            if length is not None and outcome.num_drafted:
                length += 1 if outcome.num_accepted >= outcome.num_drafted else -1
                self._lengths[outcome.request_id] = max(1, min(length, self.most))
