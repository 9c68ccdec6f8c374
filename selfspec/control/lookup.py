"""The published policies that draft by lookup alone: rows without a match draft nothing, and the others nearly free.

Both leave the finding to `selfspec.drafting.lookup`, which is exact where the originals scan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from selfspec.control.plan import FOR_EVER, LOOKUP, Plan, Policy
from selfspec.control.rows import RoundOutcome, RowState
from selfspec.control.smartspec import SmartSpec


@dataclass(frozen=True, slots=True)
class PromptLookup(Policy):
    """Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, 2023): as many tokens in every round."""

    num_draft_tokens: int = 10  # the author's

    def plan(self, rows: Sequence[RowState]) -> Plan:
        return Plan(LOOKUP, (self.num_draft_tokens,) * len(rows), num_rounds=FOR_EVER)


@dataclass(slots=True)
class SmartSpecLookup(SmartSpec):
    """SmartSpec (arXiv 2406.14066) with prompt lookup as its draft: goodput counts how often there is a match.

    That share is a moving average over rows and rounds that asked for a draft; it begins at 1.
    """

    exit_layer: int = field(default=LOOKUP, init=False)
    _matched: float = field(default=1.0, init=False)

    def observe(self, plan: Plan, rounds: Sequence[RoundOutcome]) -> None:
        SmartSpec.observe(self, plan, rounds)
        if plan.exit_layer != LOOKUP:
            return
        lengths = dict(zip(self._rows, plan.draft_lengths, strict=True))
        for outcome in (row for round_ in rounds for row in round_.rows):
            if lengths[outcome.request_id]:
                self._matched += 0.05 * ((outcome.num_drafted > 0) - self._matched)

    def goodput(self, num_draft_tokens: int, num_rows: int, context: float) -> float:
        """Tokens per second that all rows would emit if each with a match drafted so many."""
        plain = self.costs.plain_round(num_rows, context)
        if not num_draft_tokens:
            return num_rows / max(plain, 1e-12)
        drafting = self.costs.round(LOOKUP, (num_draft_tokens,) * num_rows, context)
        kept = num_rows * sum(self.acceptance**i for i in range(num_draft_tokens + 1))
        share = self._matched
        return (share * kept + (1 - share) * num_rows) / max(share * drafting + (1 - share) * plain, 1e-12)
