"""GammaTune and GammaTune+ (arXiv 2504.00030): the draft length from a moving average of accepted tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from selfspec.control.plan import Policy
from selfspec.core import Plan, RoundOutput, Sequence

ETA = 0.3  # weight of the newest round
GROWTH = 2  # tokens added when all of a draft was accepted
LEAST, MOST = 1, 10
ASSISTANT_CONFIDENCE = 0.4


@dataclass(slots=True)
class _Length:
    length: int
    average: float  # of accepted drafts


@dataclass(slots=True)
class GammaTune(Policy):
    """GammaTune, row by row.

    After a fully accepted draft, the next one is longer by two tokens, and the average does not change. After any other
    draft, the average moves towards the number of accepted tokens, and the next draft has the average's length,
    rounded up.
    """

    exit_layer: int
    num_speculative_tokens: int = 3  # in a row's first round
    min_confidence: float = 0.0
    _rows: dict[int, _Length] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: list[Sequence]) -> Plan:
        first = int(_clip(self.num_speculative_tokens))
        self._rows = {row.seq_id: self._rows.get(row.seq_id) or _Length(first, first) for row in rows}
        lengths = tuple(min(self._rows[row.seq_id].length, row.num_remaining - 1) for row in rows)
        return Plan(self.exit_layer, lengths, self.min_confidence) if any(lengths) else Plan(None, lengths)

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        for outcome in (row for round_ in rounds for row in round_.rows):
            row = self._rows.get(outcome.seq_id)
            if row is None or not outcome.num_drafted:
                continue
            if outcome.num_accepted >= outcome.num_drafted:  # including drafts that ended early by low confidence
                row.length = int(_clip(outcome.num_drafted + GROWTH))
            else:
                row.average = _clip(row.average + ETA * (outcome.num_accepted - row.average))
                row.length = ceil(row.average)


@dataclass(slots=True)
class GammaTunePlus(GammaTune):
    """GammaTune+: a draft also ends after a token of low confidence.

    The paper gives no threshold; the default is that of transformers' `assistant_confidence_threshold`.
    """

    min_confidence: float = ASSISTANT_CONFIDENCE


def _clip(length: float) -> float:
    return max(LEAST, min(length, MOST))
