"""`DraftVerify`: draft until a token is too unlikely, under a threshold that steers acceptance to a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from selfspec.control.plan import Plan, Policy
from selfspec.control.rows import RoundOutcome, RowState


@dataclass(slots=True)
class _Row:
    threshold: float
    acceptance: float = 0.0  # moving average of accepted / drafted; it starts at 0 in the authors' code


@dataclass(slots=True)
class DraftVerify(Policy):
    """The adaptive threshold of Draft & Verify (arXiv 2309.08168), with the values of DEL's baseline (2504.05598).

    Each row has a threshold of its own. A plan has one for the batch, the rows' mean; of one row it is the published
    rule.
    """

    exit_layer: int
    most: int = 18
    target: float = 0.8  # acceptance aimed at
    threshold: float = 0.6  # of a row's first round
    step: float = 0.01
    keep_acceptance: float = 0.5  # share of the old value in the moving averages: beta 1
    keep_threshold: float = 0.9  # and beta 2
    _rows: dict[int, _Row] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: Sequence[RowState]) -> Plan:
        self._rows = {row.request_id: self._rows.get(row.request_id) or _Row(self.threshold) for row in rows}
        lengths = tuple(min(self.most, row.room - 1) for row in rows)
        if not any(lengths):
            return Plan(None, lengths)
        threshold = sum(row.threshold for row in self._rows.values()) / len(self._rows)
        return Plan(self.exit_layer, lengths, threshold)

    def observe(self, plan: Plan, rounds: Sequence[RoundOutcome]) -> None:
        for outcome in (row for round_ in rounds for row in round_.rows):
            row = self._rows.get(outcome.request_id)
            if row is not None and outcome.num_drafted:
                self._learn(row, outcome.num_accepted / outcome.num_drafted)

    def _learn(self, row: _Row, accepted: float) -> None:
        row.acceptance += (1 - self.keep_acceptance) * (accepted - row.acceptance)
        # Drafts that reach the longest length are no case of their own here; in the original they keep the threshold.
        step = self.step if row.acceptance < self.target else -self.step
        row.threshold = max(0.0, min(row.threshold + (1 - self.keep_threshold) * step, 1.0))
