"""What happened, counted once: a histogram per request, everything else derived. Names follow vLLM's metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SpecStats:
    """Counts of one request, or of many when added together.

    A step is a round in which the row had at least one drafted token; rounds without a draft count as plain steps. A
    step cut short by an end of text counts the drafted tokens that were kept. Of a draft that is a tree, the draft
    length is that of the branch that the output followed; the tokens beside that are counted apart.
    """

    acceptance_histogram_by_draft_length: dict[int, Counter[int]] = field(default_factory=dict)
    num_plain_steps: int = 0
    num_generated_tokens: int = 0
    num_side_tokens: int = 0  # drafted beside those branches

    def add_round(self, drafted: int, accepted: int, emitted: int, beside: int = 0) -> None:
        self.num_generated_tokens += emitted
        self.num_side_tokens += beside
        if drafted == 0:
            self.num_plain_steps += 1
            return
        counts = self.acceptance_histogram_by_draft_length.get(drafted)
        if counts is None:
            counts = self.acceptance_histogram_by_draft_length[drafted] = Counter()
        counts[accepted] = counts.get(accepted, 0) + 1

    def __add__(self, other: SpecStats) -> SpecStats:
        total = SpecStats({}, self.num_plain_steps + other.num_plain_steps, self.num_generated_tokens)
        total.num_generated_tokens += other.num_generated_tokens
        total.num_side_tokens = self.num_side_tokens + other.num_side_tokens
        for part in (self, other):
            for length, counts in part.acceptance_histogram_by_draft_length.items():
                total.acceptance_histogram_by_draft_length.setdefault(length, Counter()).update(counts)
        return total

    @property
    def acceptance_histogram(self) -> Counter[int]:
        """Accepted draft tokens -> number of steps."""
        return sum(self.acceptance_histogram_by_draft_length.values(), Counter[int]())

    @property
    def num_spec_steps(self) -> int:
        return self.acceptance_histogram.total()

    @property
    def num_draft_tokens(self) -> int:
        followed = sum(d * counts.total() for d, counts in self.acceptance_histogram_by_draft_length.items())
        return followed + self.num_side_tokens

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(a * n for a, n in self.acceptance_histogram.items())

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step with the bonus token: 1 + accepted / steps; 1 for plain decoding."""
        steps = self.num_spec_steps
        return 1 + self.num_accepted_draft_tokens / steps if steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        drafted = self.num_draft_tokens
        return self.num_accepted_draft_tokens / drafted if drafted else 0.0

    def acceptance_by_position(self) -> list[tuple[float, float]]:
        """(joint, conditional) acceptance of draft positions 1, 2, ..., up to the last that any step reached.

        Joint: steps that accepted at least i, over steps that drafted at least i. Conditional: over steps that reached
        i, which drafted as much and accepted all before it.
        """
        rates = []
        for i in range(1, max(self.acceptance_histogram_by_draft_length, default=0) + 1):
            deep = [counts for d, counts in self.acceptance_histogram_by_draft_length.items() if d >= i]
            tried = sum(counts.total() for counts in deep)
            reached = sum(n for counts in deep for a, n in counts.items() if a >= i - 1)
            if not reached:
                break
            kept = sum(n for counts in deep for a, n in counts.items() if a >= i)
            rates.append((kept / tried, kept / reached))
        return rates

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "num_generated_tokens": self.num_generated_tokens,
            "num_spec_steps": self.num_spec_steps,
            "num_plain_steps": self.num_plain_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": {str(k): n for k, n in sorted(self.acceptance_histogram.items())},
            "acceptance_by_position": [
                {"joint": joint, "conditional": conditional} for joint, conditional in self.acceptance_by_position()
            ],
        }
