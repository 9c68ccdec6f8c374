"""LayerSkip (arXiv 2404.16710): a fixed exit layer and draft length."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.control.plan import Policy
from selfspec.core import UNBOUNDED_ROUNDS, Plan, Sequence


@dataclass(frozen=True, slots=True)
class Fixed(Policy):
    """Draft `num_speculative_tokens` tokens by `exit_layer` layers in every round.

    Two options are not in the paper. `draft_vocab` limits drafts to the N most frequent tokens; verification is over
    the whole vocabulary. With `draft_bits` 4, 4-bit copies of the layers draft, where there are any, and all layers
    verify.
    """

    exit_layer: int
    num_speculative_tokens: int
    min_confidence: float = 0.0
    draft_vocab: int | None = None
    draft_bits: int | None = None

    def plan(self, rows: list[Sequence]) -> Plan:
        return self._plan(len(rows))

    def likely(self, num_rows: int) -> list[Plan]:
        return [Plan(None, (0,) * num_rows), self._plan(num_rows)]

    def _plan(self, num_rows: int) -> Plan:
        return Plan(
            self.exit_layer,
            (self.num_speculative_tokens,) * num_rows,
            self.min_confidence,
            draft_vocab=self.draft_vocab,
            draft_bits=self.draft_bits,
            num_rounds=UNBOUNDED_ROUNDS,
        )
