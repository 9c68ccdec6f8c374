"""`Correction` corrects predicted round times by measured ones; `ForecastRatio` corrects forecasts of emitted tokens.

`Correction` has a ratio per drafter and batch size. Rounds that draft are compared with plain rounds of about the same
time, so that a machine that is slower for all rounds changes no ratio.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from selfspec.control.decay import Decayed, TokenClock
from selfspec.core import LOOKUP

PLAIN, BY_EXIT, BY_COPIES, BY_LOOKUP = range(4)
READINGS, LEAST = 9, 3  # measurements kept per drafter and size, and the number that a ratio needs
EARLY, NEAR = 48, 512  # rounds before the first comparison; largest age of compared measurements in rounds
GAIN, MOST = 0.35, math.log(3.0)  # of a ratio's logarithm: step size of an update, and largest absolute value
FORGET = 1024.0  # half-life of a ratio's logarithm without new measurements, in rounds
PRIOR_TOKENS, HALF_LIFE = 20.0, 60.0  # pseudo-observations of a ratio of 1, and the half-life, in tokens per row


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
