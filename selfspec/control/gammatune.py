"""`GammaTune` and `GammaTunePlus`: draft lengths that follow a moving average of how much was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from selfspec.control.plan import Plan, Policy
from selfspec.control.rows import RoundOutcome, RowState

ETA = 0.3  # weight of the newest round
DELTA = 2  # tokens added when all of a draft was accepted
LEAST, MOST = 1, 10
ASSISTANT_CONFIDENCE = 0.4


@dataclass(slots=True)
class _Row:
    length: int
    average: float  # of accepted drafts


@dataclass(slots=True)
class GammaTune(Policy):
    """GammaTune (arXiv 2504.00030), row by row.

    After a draft that was accepted whole, the next is longer by two, and the average stays as it is. After any other,
    the average moves towards what was accepted, and the next draft is as long as that, rounded up.
    """

    exit_layer: int
    num_draft_tokens: int = 3  # in a row's first round
    min_confidence: float = 0.0
    _rows: dict[int, _Row] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: Sequence[RowState]) -> Plan:
        first = int(_clip(self.num_draft_tokens))
        self._rows = {row.request_id: self._rows.get(row.request_id) or _Row(first, first) for row in rows}
        lengths = tuple(min(self._rows[row.request_id].length, row.room - 1) for row in rows)
        return Plan(self.exit_layer, lengths, self.min_confidence) if any(lengths) else Plan(None, lengths)

    def observe(self, plan: Plan, rounds: Sequence[RoundOutcome]) -> None:
        for outcome in (row for round_ in rounds for row in round_.rows):
            row = self._rows.get(outcome.request_id)
            if row is None or not outcome.num_drafted:
                continue
            if outcome.num_accepted >= outcome.num_drafted:  # also of a draft that its confidence ended early
                row.length = int(_clip(outcome.num_drafted + DELTA))
            else:
                row.average = _clip(row.average + ETA * (outcome.num_accepted - row.average))
                row.length = ceil(row.average)


@dataclass(slots=True)
class GammaTunePlus(GammaTune):
    """GammaTune+: a draft also ends after a token the draft itself is unsure of.

    The paper gives no threshold; the default is that of transformers' `assistant_confidence_threshold`.
    """

    min_confidence: float = ASSISTANT_CONFIDENCE


def _clip(length: float) -> float:
    return max(LEAST, min(length, MOST))
