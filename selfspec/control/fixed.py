"""Policies that learn nothing: plain decoding, one exit layer and draft length (arXiv 2404.16710), prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.control.plan import FOR_EVER, LOOKUP, Plan, Policy
from selfspec.control.rows import RowState


@dataclass(frozen=True, slots=True)
class Plain(Policy):
    """Every token by the whole model."""

    def plan(self, rows: Sequence[RowState]) -> Plan:
        return Plan(None, (0,) * len(rows), num_rounds=FOR_EVER)


@dataclass(frozen=True, slots=True)
class Fixed(Policy):
    """Leave at `exit_layer`, draft `num_draft_tokens`, or as many as the row may still use.

    With `draft_vocab`, drafts are over so many tokens, the most frequent; the target judges them over all. With
    `draft_bits` 4, they are written by copies of the layers in 4 bits, where engine 'compiled' runs; all layers judge.
    """

    exit_layer: int
    num_draft_tokens: int
    min_confidence: float = 0.0
    draft_vocab: int | None = None
    draft_bits: int | None = None

    def plan(self, rows: Sequence[RowState]) -> Plan:
        return Plan(
            self.exit_layer,
            (self.num_draft_tokens,) * len(rows),
            self.min_confidence,
            draft_vocab=self.draft_vocab,
            draft_bits=self.draft_bits,
            num_rounds=FOR_EVER,
        )


@dataclass(frozen=True, slots=True)
class PromptLookup(Policy):
    """Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, 2023): as many tokens in every round."""

    num_draft_tokens: int = 10  # the author's

    def plan(self, rows: Sequence[RowState]) -> Plan:
        return Plan(LOOKUP, (self.num_draft_tokens,) * len(rows), num_rounds=FOR_EVER)
