"""Synergy (arXiv 2310.18813): for each batch size, the draft length with the fewest seconds per token."""

from __future__ import annotations

from dataclasses import dataclass, field

from selfspec.control.costs import Costs
from selfspec.control.plan import Policy
from selfspec.core import Plan, Sequence

SCALE, POWER = 0.9, 0.55  # accepted tokens of a draft of s tokens: SCALE * s ** POWER, as fitted in the paper


@dataclass(slots=True)
class Synergy(Policy):
    """The adaptive draft length.

    A round with s drafted tokens per row emits accepted(s) + 1 tokens per row. Length 0 is plain decoding. The policy
    does not learn during decoding.
    """

    exit_layer: int
    costs: Costs
    most: int = 8
    accepted: tuple[float, ...] = ()  # measured accepted tokens by draft length 0, 1, 2, ..; empty: the paper's fit
    _lengths: dict[int, int] = field(default_factory=dict, init=False, repr=False)  # by batch size

    def plan(self, rows: list[Sequence]) -> Plan:
        length = self.length(len(rows)) if rows else 0
        lengths = tuple(min(length, row.num_remaining - 1) for row in rows)
        return Plan(self.exit_layer if any(lengths) else None, lengths)

    def length(self, batch_size: int) -> int:
        """Draft length per row of a batch of this size."""
        if batch_size not in self._lengths:
            most = min(self.most, len(self.accepted) - 1) if self.accepted else self.most
            self._lengths[batch_size] = min(range(most + 1), key=lambda s: self._seconds_per_token(batch_size, s))
        return self._lengths[batch_size]

    def _seconds_per_token(self, batch_size: int, num_speculative_tokens: int) -> float:
        s = num_speculative_tokens
        accepted = self.accepted[s] if self.accepted else SCALE * s**POWER
        seconds = self.costs.round(self.exit_layer if s else None, (s,) * batch_size)
        return seconds / (batch_size * (accepted + 1))
