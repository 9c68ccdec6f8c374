"""Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, 2023) with a fixed draft length."""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.control.plan import Policy
from selfspec.core import LOOKUP, UNBOUNDED_ROUNDS, Plan, Sequence


@dataclass(frozen=True, slots=True)
class PromptLookup(Policy):
    """Draft the tokens that followed the latest earlier occurrence of a row's last tokens, in every round."""

    num_speculative_tokens: int = 10  # as published

    def plan(self, rows: list[Sequence]) -> Plan:
        return Plan(LOOKUP, (self.num_speculative_tokens,) * len(rows), num_rounds=UNBOUNDED_ROUNDS)
