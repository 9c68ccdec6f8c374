"""DSDE (arXiv 2509.01083): the draft length from the variance of the divergence between draft and target.

Its plans keep divergences: on CPU, `selfspec.executors.eager` runs them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, exp

from selfspec.control.plan import Policy
from selfspec.core import Plan, RoundOutput, Sequence

DISCOUNT = 0.85  # weight of a token's divergence against that of the token after it
SHORT_WINDOW, LONG_WINDOW = 10, 30  # tokens in the two windows
SL_MIN = 2
CALIBRATION = 4  # rounds; the paper's number is not given
EPSILON = 1e-9
LARGEST = 10.0  # nats; filtered logits may make the divergence infinite


@dataclass(slots=True)
class _Divergences:
    predicted: float  # draft length, SL hat
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=LONG_WINDOW))  # divergences, oldest first
    calibration: list[float] = field(default_factory=list)  # divergences of the first rounds
    rounds: int = 0
    longest: int = 0  # tokens accepted in a calibration round
    sl_max: float = SL_MIN


@dataclass(slots=True)
class DSDE(Policy):
    """DSDE on a fixed exit layer.

    A row's first rounds draft `num_speculative_tokens` and set its maximum length SL_max. After them

        SL = SL_min + (1 - SF WVIR) (SL_max - SL_min), and SL_min where SF WVIR > 1,

    with SF = exp(2 mean divergence of the last round) - 1, and WVIR the weighted variance of the last 10 divergences
    over that of the last 30. No row drafts more than the batch's mean SL, since the longest draft determines the time
    of a round. Lengths are rounded up. Every round drafts.
    """

    exit_layer: int
    num_speculative_tokens: int = 5  # in the rounds of calibration
    _rows: dict[int, _Divergences] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: list[Sequence]) -> Plan:
        first = self.num_speculative_tokens
        self._rows = {row.seq_id: self._rows.get(row.seq_id) or _Divergences(first) for row in rows}
        predicted = [self._rows[row.seq_id].predicted for row in rows]
        cap = ceil(sum(predicted) / len(rows)) if rows else 0
        lengths = tuple(min(ceil(sl), cap, row.num_remaining - 1) for sl, row in zip(predicted, rows, strict=True))
        return Plan(self.exit_layer if any(lengths) else None, lengths, keep_divergence=any(lengths))

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        for outcome in (row for round_ in rounds for row in round_.rows):
            row = self._rows.get(outcome.seq_id)
            divergences = [max(0.0, min(d, LARGEST)) for d in outcome.divergences if d == d]  # without NaN
            if row is None or not divergences:
                continue
            row.rounds += 1
            row.recent.extend(divergences)
            if row.rounds <= CALIBRATION:
                _calibrate(row, divergences, outcome.num_accepted)
            if row.rounds >= CALIBRATION:
                scale = exp(2 * sum(divergences) / len(divergences)) - 1
                share = max(0.0, 1 - scale * _instability(row.recent))
                row.predicted = SL_MIN + share * (row.sl_max - SL_MIN)


def _calibrate(row: _Divergences, divergences: Iterable[float], num_accepted: int) -> None:
    row.calibration.extend(divergences)
    row.longest = max(row.longest, num_accepted)
    mean = sum(row.calibration) / len(row.calibration)
    row.sl_max = max(SL_MIN, row.longest * (1 + mean / (max(row.calibration) + EPSILON)))


def _instability(divergences: Iterable[float]) -> float:
    """WVIR: the weighted variance in the short window over that in the long window."""
    newest_first = list(divergences)[::-1]
    long = _weighted_variance(newest_first)
    return _weighted_variance(newest_first[:SHORT_WINDOW]) / long if long > EPSILON else 1.0


def _weighted_variance(newest_first: list[float]) -> float:
    weights = [DISCOUNT**age for age in range(len(newest_first))]
    total = sum(weights)
    mean = sum(w * x for w, x in zip(weights, newest_first, strict=True)) / total
    return sum(w * (x - mean) ** 2 for w, x in zip(weights, newest_first, strict=True)) / total
