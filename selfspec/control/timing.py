"""When to decide again, when to probe layers, and what measured times say about predicted ones.

`Schedule` counts rounds. `Correction` has a ratio of measured to predicted time per drafter and batch size: rounds that
draft are compared with plain rounds of about the same time, so that a machine that is slower for all rounds changes no
ratio. `ForecastRatio` compares emitted with forecast tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from selfspec.control.acceptance import Decayed, TokenClock
from selfspec.control.costs import Costs
from selfspec.control.plan import ShadowPlan
from selfspec.core import LOOKUP

# Rounds between decisions: for a layer without enough observations; else at first, doubling up to the maximum.
UNKNOWN, FIRST, MOST_ROUNDS = 4, 16, 64
DECISION_SECONDS, DECISION_SHARE = 1e-3, 0.03  # seconds of a decision, and the largest share of the time for decisions
PROBE_SHARE = 0.006  # share of the time for probing layers
INITIAL_DEBT = (0.1, 1.0)  # initial budget for probes, in negative full probes: without and with a prior
MAX_DEBT = 10.0  # lower limit of the budget, in negative full probes
COLUMNS, ROWS = 20, 4  # probed positions per row, and rows per probe, at most
SMOOTHING = 0.1  # of the moving average of the seconds per round
# Plain rounds of a timing reference; its share of the time; and the fewest rounds between two.
BLOCK, BLOCK_SHARE, MIN_INTERVAL = 4, 0.005, 192

PLAIN, BY_EXIT, BY_COPIES, BY_LOOKUP = range(4)
READINGS, LEAST = 9, 3  # measurements kept per drafter and size, and the number that a ratio needs
EARLY, NEAR = 48, 512  # rounds before the first comparison; largest age of compared measurements in rounds
GAIN, MOST = 0.35, math.log(3.0)  # of a ratio's logarithm: step size of an update, and largest absolute value
FORGET = 1024.0  # half-life of a ratio's logarithm without new measurements, in rounds
PRIOR_TOKENS, HALF_LIFE = 20.0, 60.0  # pseudo-observations of a ratio of 1, and the half-life, in tokens per row


class Schedule:
    """Counts rounds, and keeps a time budget for probes, which grows by a share of the time.

    Args:
        has_prior: whether there are acceptance statistics of earlier texts.
    """

    def __init__(self, costs: Costs, has_prior: bool) -> None:
        self._costs = costs
        self._full_probe = costs.shadow(costs.num_layers - 1, COLUMNS)
        self._budget = -INITIAL_DEBT[has_prior] * self._full_probe
        self._rounds_left, self._interval = 0, FIRST
        self._next_row = 0  # the first row of the next probe
        self._round_seconds = 0.0  # moving average
        self._probe_in = 0  # rounds before the next probe
        self._expected_probe = 0.0  # predicted seconds of the last probe
        self.block = 0
        """Remaining plain rounds of a timing reference."""

    def decide_now(self) -> None:
        """Make a decision due in the next round."""
        self._rounds_left = 0

    @property
    def is_due(self) -> bool:
        """Whether a decision is due."""
        return self._rounds_left <= 0 and not self.block

    def decided(self, round_seconds: float, is_other: bool, is_known: bool) -> None:
        """Plan the next decision after one was made.

        Args:
            round_seconds: expected seconds of the next rounds.
            is_other: whether the batch has other rows than at the decision before.
            is_known: whether the exit layer has enough observations.
        """
        self._interval = FIRST if is_other else min(2 * self._interval, MOST_ROUNDS)
        rounds = self._interval if is_known else UNKNOWN
        self._rounds_left = max(rounds, math.ceil(DECISION_SECONDS / (DECISION_SHARE * round_seconds)))
        self._round_seconds = self._round_seconds or round_seconds
        self._plan_probe()

    def compare(self) -> None:
        """Make the next `BLOCK` rounds plain."""
        self.block = BLOCK

    def rounds_apart(self, speedup: float) -> float:
        """Rounds between two timing references, so that these take at most `BLOCK_SHARE` of the time."""
        return max(MIN_INTERVAL, BLOCK * (speedup - 1) / BLOCK_SHARE)

    @property
    def probe_is_due(self) -> bool:
        """Whether the budget allows a probe now."""
        if self._probe_in > 0 or self.block:
            return False
        if self._budget < 0:
            self._plan_probe()
        return self._budget >= 0

    def _plan_probe(self) -> None:
        """Set the number of rounds until the budget is expected to allow a probe."""
        paid = PROBE_SHARE * self._round_seconds
        self._probe_in = max(1, math.ceil(-self._budget / paid)) if self._budget < 0 < paid else max(0, self._probe_in)

    @property
    def num_rounds(self) -> int:
        """Rounds until the next decision."""
        return max(1, self._rounds_left)

    @property
    def rounds_before_probe(self) -> int:
        """Rounds until the next probe."""
        return max(1, self._probe_in)

    def probe(self, layers: tuple[int, ...], num_rows: int, emitted: float) -> ShadowPlan | None:
        """The next probe, of these layers at a few rows in turn; None without layers. `emitted`: tokens per row."""
        if not layers:
            self._budget = -self._full_probe
            self._plan_probe()
            return None
        count, most, each = 1, min(num_rows, ROWS), math.ceil(emitted)
        while count < most and self._costs.shadow(len(layers), (count + 1) * each) < self._budget:
            count += 1
        self._expected_probe = self._costs.shadow(len(layers), count * each)
        rows = tuple(sorted((self._next_row + i) % num_rows for i in range(count)))
        self._next_row = (self._next_row + count) % num_rows
        return ShadowPlan(layers, rows, 1 if emitted <= 1 else COLUMNS)

    def pay(self, seconds: float) -> None:
        """Subtract the seconds of a probe from the budget."""
        self._budget = max(self._budget - seconds, -MAX_DEBT * self._full_probe)

    def pass_round(self, forwards: float, probing: float | None) -> None:
        """Count a round, with the seconds of its forwards and of its probe, if it had one."""
        if self.block:
            self.block -= 1
        else:
            self._rounds_left -= 1
            self._probe_in -= 1
        self._round_seconds += (SMOOTHING if self._round_seconds else 1.0) * (max(0.0, forwards) - self._round_seconds)
        self._budget = min(self._budget + PROBE_SHARE * max(0.0, forwards), self._full_probe)
        if probing is not None:
            self.pay(max(probing, self._expected_probe) + DECISION_SECONDS)
            self._rounds_left = min(self._rounds_left, 0)  # decide with the new statistics
            self._plan_probe()


def kind_of(exit_layer: int | None, draft_bits: int | None) -> int:
    """The drafter of a round: PLAIN, BY_EXIT, BY_COPIES or BY_LOOKUP."""
    if exit_layer is None:
        return PLAIN
    if exit_layer == LOOKUP:
        return BY_LOOKUP
    return BY_EXIT if draft_bits is None else BY_COPIES


class Correction:
    """Ratios of measured to predicted time, per drafter and bit length of the batch size.

    Args:
        table: numbers that identify the cost table; a prior of another table is ignored.
        prior: the `state` of an earlier instance on this machine; anything else is ignored.
    """

    def __init__(self, table: Sequence[float], prior: Any = None) -> None:
        self._table = [float(f"{one:.6g}") for one in table]
        self._ratios: dict[tuple[int, int], tuple[float, int]] = {}  # (logarithm, round) by kind and size
        self._readings: dict[tuple[int, int], deque[tuple[int, float]]] = {}
        self._round = self._last_plain = 0
        self._read(prior)

    def pass_round(self) -> None:
        """Count a round."""
        self._round += 1

    def add(self, kind: int, num_rows: int, expected: float, took: float) -> None:
        """Compare the measured seconds of a round with the predicted ones."""
        if not (expected > 0 and took > 0):
            return
        size = num_rows.bit_length()
        readings = self._readings.setdefault((kind, size), deque(maxlen=READINGS))
        readings.append((self._round, math.log(took / expected)))
        if kind == PLAIN:
            self._last_plain = self._round
        for other in (BY_EXIT, BY_COPIES, BY_LOOKUP) if kind == PLAIN else (kind,):
            self._compare(other, size)

    def ratio(self, kind: int, num_rows: int) -> float:
        """Measured over predicted time of rounds by this drafter, relative to that of plain rounds."""
        known = [(abs(size - num_rows.bit_length()), size) for of, size in self._ratios if of == kind]
        return math.exp(self._value((kind, min(known)[1]))) if known else 1.0

    def wants_plain(self, kind: int, apart: float) -> bool:
        """Whether `apart` rounds have passed since the last plain round or request for one.

        Where the drafter has no ratio yet, `EARLY` rounds suffice.
        """
        if not any(of == kind for of, _ in self._ratios):
            apart = min(apart, EARLY)
        if self._round - self._last_plain < apart:
            return False
        self._last_plain = self._round
        return True

    def state(self) -> dict[str, Any]:
        """The ratios as plain numbers, for the `prior` of a later instance."""
        return {
            "table": self._table,
            "ratios": [[kind, size, round(self._value((kind, size)), 4)] for kind, size in self._ratios],
        }

    def _value(self, key: tuple[int, int]) -> float:
        value, at = self._ratios[key]
        return value * 0.5 ** ((self._round - at) / FORGET)

    def _compare(self, kind: int, size: int) -> None:
        plain, drafted = (
            [value for at, value in self._readings.get((one, size), ()) if self._round - at <= NEAR]
            for one in (PLAIN, kind)
        )
        if min(len(plain), len(drafted)) < LEAST:
            return
        key = kind, size
        value, gain = (self._value(key), GAIN) if key in self._ratios else (0.0, 1.0)
        value += gain * (median(drafted) - median(plain) - value)
        self._ratios[key] = min(max(value, -MOST), MOST), self._round

    def _read(self, prior: Any) -> None:
        try:
            ratios = [(int(kind), int(size), float(value)) for kind, size, value in prior["ratios"]]
            is_same = list(prior["table"]) == self._table
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        if is_same and all(kind in (BY_EXIT, BY_COPIES, BY_LOOKUP) and abs(value) <= MOST for kind, _, value in ratios):
            self._ratios = {(kind, size): (value, 0) for kind, size, value in ratios}


class ForecastRatio:
    """Emitted tokens over forecast tokens. Forecasts are too high on average, since the highest one is chosen."""

    def __init__(self, clock: TokenClock) -> None:
        self._counts = Decayed((2,), HALF_LIFE, clock)  # emitted, forecast

    @property
    def ratio(self) -> float:
        emitted, forecast = self._counts.now().tolist()
        return float((emitted + PRIOR_TOKENS) / (forecast + PRIOR_TOKENS))

    def add(self, emitted: float, forecast: float) -> None:
        """Count the tokens of a round, per row."""
        self._counts.add(0, emitted)
        self._counts.add(1, forecast)
