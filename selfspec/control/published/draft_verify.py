"""Draft & Verify (arXiv 2309.08168): a threshold of confidence that follows the acceptance rate."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.control.plan import Policy
from selfspec.core import Plan, RoundOutput, Sequence


@dataclass(slots=True)
class _Threshold:
    threshold: float
    acceptance: float = 0.0  # moving average of accepted / drafted; it starts at 0 in the authors' code


@dataclass(slots=True)
class DraftVerify(Policy):
    """The adaptive threshold of Draft & Verify, with the values of DEL's baseline (arXiv 2504.05598).

    Each row has a threshold. The plan's threshold is their mean; for a single row this is the published rule.
    """

    exit_layer: int
    most: int = 18
    target: float = 0.8  # acceptance aimed at
    threshold: float = 0.6  # of a row's first round
    step: float = 0.01
    keep_acceptance: float = 0.5  # share of the old value in the moving averages: beta 1
    keep_threshold: float = 0.9  # and beta 2
    _rows: dict[int, _Threshold] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: list[Sequence]) -> Plan:
        self._rows = {row.seq_id: self._rows.get(row.seq_id) or _Threshold(self.threshold) for row in rows}
        lengths = tuple(min(self.most, row.num_remaining - 1) for row in rows)
        if not any(lengths):
            return Plan(None, lengths)
        threshold = sum(row.threshold for row in self._rows.values()) / len(self._rows)
        return Plan(self.exit_layer, lengths, threshold)

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        for outcome in (row for round_ in rounds for row in round_.rows):
            row = self._rows.get(outcome.seq_id)
            if row is not None and outcome.num_drafted:
                self._learn(row, outcome.num_accepted / outcome.num_drafted)

    def _learn(self, row: _Threshold, accepted: float) -> None:
        row.acceptance += (1 - self.keep_acceptance) * (accepted - row.acceptance)
        # Differs from the original, where drafts of the maximum length do not change the threshold.
        step = self.step if row.acceptance < self.target else -self.step
        row.threshold = max(0.0, min(row.threshold + (1 - self.keep_threshold) * step, 1.0))
