"""Policies without statistics: plain decoding, fixed exit layer and draft length (arXiv 2404.16710), prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.control.plan import Policy
from selfspec.core import LOOKUP, UNBOUNDED_ROUNDS, Plan, Sequence


@dataclass(frozen=True, slots=True)
class Plain(Policy):
    """Plain decoding."""

    def plan(self, rows: list[Sequence]) -> Plan:
        return Plan(None, (0,) * len(rows), num_rounds=UNBOUNDED_ROUNDS)


@dataclass(frozen=True, slots=True)
class Fixed(Policy):
    """Draft `num_draft_tokens` tokens by `exit_layer` layers in every round.

    `draft_vocab` limits drafts to the N most frequent tokens; verification is over the whole vocabulary. With
    `draft_bits` 4, 4-bit copies of the layers draft, where engine 'compiled' runs, and all layers verify.
    """

    exit_layer: int
    num_draft_tokens: int
    min_confidence: float = 0.0
    draft_vocab: int | None = None
    draft_bits: int | None = None

    def plan(self, rows: list[Sequence]) -> Plan:
        return Plan(
            self.exit_layer,
            (self.num_draft_tokens,) * len(rows),
            self.min_confidence,
            draft_vocab=self.draft_vocab,
            draft_bits=self.draft_bits,
            num_rounds=UNBOUNDED_ROUNDS,
        )


@dataclass(frozen=True, slots=True)
class PromptLookup(Policy):
    """Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, 2023) with a fixed draft length."""

    num_draft_tokens: int = 10  # as published

    def plan(self, rows: list[Sequence]) -> Plan:
        return Plan(LOOKUP, (self.num_draft_tokens,) * len(rows), num_rounds=UNBOUNDED_ROUNDS)
