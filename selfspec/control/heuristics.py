"""Published rules that set draft lengths from the outcomes of earlier drafts, on a fixed exit layer."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, exp

from selfspec.control.plan import Policy
from selfspec.core import Plan, RoundOutput, Sequence

# GammaTune:
ETA = 0.3  # weight of the newest round
GROWTH = 2  # tokens added when all of a draft was accepted
LEAST, MOST = 1, 10
ASSISTANT_CONFIDENCE = 0.4
# DSDE:
DISCOUNT = 0.85  # weight of a token's divergence against that of the token after it
SHORT_WINDOW, LONG_WINDOW = 10, 30  # tokens in the two windows
SL_MIN = 2
CALIBRATION = 4  # rounds; the paper's number is not given
EPSILON = 1e-9
LARGEST = 10.0  # nats; filtered logits may make the divergence infinite


@dataclass(slots=True)
class FiniteState(Policy):
    """Each row's draft grows by one when all of it is accepted and shrinks by one otherwise.

    The baseline FS-LayerSkip of DEL (arXiv 2504.05598). The minimum is 1 token, since a length of 0 could not grow.
    """

    exit_layer: int
    num_draft_tokens: int  # in a row's first round
    most: int = 18
    _lengths: dict[int, int] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: list[Sequence]) -> Plan:
        first = max(1, min(self.num_draft_tokens, self.most))
        self._lengths = {row.seq_id: self._lengths.get(row.seq_id, first) for row in rows}
        lengths = tuple(min(self._lengths[row.seq_id], row.num_remaining - 1) for row in rows)
        return Plan(self.exit_layer if any(lengths) else None, lengths)

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        for outcome in (row for round_ in rounds for row in round_.rows):
            length = self._lengths.get(outcome.seq_id)
            if length is not None and outcome.num_drafted:
                length += 1 if outcome.num_accepted >= outcome.num_drafted else -1
                self._lengths[outcome.seq_id] = max(1, min(length, self.most))


@dataclass(slots=True)
class _Length:
    length: int
    average: float  # of accepted drafts


@dataclass(slots=True)
class GammaTune(Policy):
    """GammaTune (arXiv 2504.00030), row by row.

    After a fully accepted draft, the next one is longer by two tokens, and the average does not change. After any other
    draft, the average moves towards the number of accepted tokens, and the next draft has the average's length,
    rounded up.
    """

    exit_layer: int
    num_draft_tokens: int = 3  # in a row's first round
    min_confidence: float = 0.0
    _rows: dict[int, _Length] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: list[Sequence]) -> Plan:
        first = int(_clip(self.num_draft_tokens))
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


@dataclass(slots=True)
class _Threshold:
    threshold: float
    acceptance: float = 0.0  # moving average of accepted / drafted; it starts at 0 in the authors' code


@dataclass(slots=True)
class DraftVerify(Policy):
    """The adaptive threshold of Draft & Verify (arXiv 2309.08168), with the values of DEL's baseline (2504.05598).

    Each row has a threshold. The plan's threshold is their mean; for a single row this is the published rule.
    """

    exit_layer: int
    most: int = 18
    target: float = 0.8  # acceptance aimed at
    threshold: float = 0.6  # of a row's first round
    step: float = 0.01
    keep_acceptance: float = 0.5  # share of the old value in the moving averages: beta 1
    keep_threshold: float = 0.9  # and beta 2
    _rows: dict[int, _Threshold] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: list[Sequence]) -> Plan:
        self._rows = {row.seq_id: self._rows.get(row.seq_id) or _Threshold(self.threshold) for row in rows}
        lengths = tuple(min(self.most, row.num_remaining - 1) for row in rows)
        if not any(lengths):
            return Plan(None, lengths)
        threshold = sum(row.threshold for row in self._rows.values()) / len(self._rows)
        return Plan(self.exit_layer, lengths, threshold)

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        for outcome in (row for round_ in rounds for row in round_.rows):
            row = self._rows.get(outcome.seq_id)
            if row is not None and outcome.num_drafted:
                self._learn(row, outcome.num_accepted / outcome.num_drafted)

    def _learn(self, row: _Threshold, accepted: float) -> None:
        row.acceptance += (1 - self.keep_acceptance) * (accepted - row.acceptance)
        # Differs from the original, where drafts of the maximum length do not change the threshold.
        step = self.step if row.acceptance < self.target else -self.step
        row.threshold = max(0.0, min(row.threshold + (1 - self.keep_threshold) * step, 1.0))


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
    """DSDE (arXiv 2509.01083), on a fixed exit layer.

    A row's first rounds draft `num_draft_tokens` and set its maximum length SL_max. After them

        SL = SL_min + (1 - SF WVIR) (SL_max - SL_min), and SL_min where SF WVIR > 1,

    with SF = exp(2 mean divergence of the last round) - 1, and WVIR the weighted variance of the last 10 divergences
    over that of the last 30. No row drafts more than the batch's mean SL, since the longest draft determines the time
    of a round. Lengths are rounded up. Every round drafts.
    """

    exit_layer: int
    num_draft_tokens: int = 5  # in the rounds of calibration
    _rows: dict[int, _Divergences] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: list[Sequence]) -> Plan:
        first = self.num_draft_tokens
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


def _weighted_variance(newest_first: abc.Sequence[float]) -> float:
    weights = [DISCOUNT**age for age in range(len(newest_first))]
    total = sum(weights)
    mean = sum(w * x for w, x in zip(weights, newest_first, strict=True)) / total
    return sum(w * (x - mean) ** 2 for w, x in zip(weights, newest_first, strict=True)) / total
