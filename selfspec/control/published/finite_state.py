"""FS-LayerSkip, the finite-state baseline of DEL (arXiv 2504.05598): a token longer or shorter after every draft."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.control.plan import Policy
from selfspec.core import Plan, RoundOutput, Sequence


@dataclass(slots=True)
class FiniteState(Policy):
    """Each row's draft grows by one when all of it is accepted and shrinks by one otherwise.

    The minimum is 1 token, since a length of 0 could not grow.
    """

    exit_layer: int
    num_speculative_tokens: int  # in a row's first round
    most: int = 18
    _lengths: dict[int, int] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: list[Sequence]) -> Plan:
        first = max(1, min(self.num_speculative_tokens, self.most))
        self._lengths = {row.seq_id: self._lengths.get(row.seq_id, first) for row in rows}
        lengths = tuple(min(self._lengths[row.seq_id], row.num_remaining - 1) for row in rows)
        return Plan(self.exit_layer if any(lengths) else None, lengths)

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        for outcome in (row for round_ in rounds for row in round_.rows):
            length = self._lengths.get(outcome.seq_id)
            if length is not None and outcome.num_drafted:
                length += 1 if outcome.num_accepted >= outcome.num_drafted else -1
                self._lengths[outcome.seq_id] = max(1, min(length, self.most))
