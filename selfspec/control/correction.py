"""`Correction`: how much longer rounds that draft take than the table of costs says, and how far forecasts come true.

Both are ratios near 1. The first is set by the clock, per drafter and batch size: rounds that draft are held against
plain rounds near them, so that a machine that is slow for all of them changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from selfspec.control.decay import Decayed, Passed
from selfspec.control.plan import LOOKUP

PLAIN, BY_EXIT, BY_COPIES, BY_LOOKUP = range(4)
READINGS, LEAST = 9, 3  # of a kind of round that are kept, and that a ratio needs
EARLY, NEAR = 48, 512  # rounds before the first comparison, and between readings that are compared
GAIN, MOST = 0.35, math.log(3.0)  # of the logarithm of a ratio: the share of what is new, and how far it may go
FORGET = 1024.0  # rounds after which a ratio that nothing confirms counts half
BELIEVED, HALF_LIFE = 20.0, 60.0  # tokens that a forecast is believed for, and after which what came counts half


def kind_of(exit_layer: int | None, draft_bits: int | None) -> int:
    """Who drafts."""
    if exit_layer is None:
        return PLAIN
    if exit_layer == LOOKUP:
        return BY_LOOKUP
    return BY_EXIT if draft_bits is None else BY_COPIES


class Correction:
    """One ratio per drafter and batch size (by its bit length).

    Args:
        prior: what `state` of an earlier one on this machine returned; anything else is passed over.
        table: numbers that tell one table of costs from another: a prior by other costs is passed over.
    """

    def __init__(self, table: Sequence[float], prior: Any = None) -> None:
        self._table = [float(f"{one:.6g}") for one in table]
        self._ratios: dict[tuple[int, int], tuple[float, int]] = {}  # (logarithm, round) by kind and size
        self._readings: dict[tuple[int, int], deque[tuple[int, float]]] = {}
        self._round = self._last_plain = 0
        self._read(prior)

    def pass_round(self) -> None:
        self._round += 1

    def look(self, kind: int, num_rows: int, expected: float, took: float) -> None:
        """Hold a round's seconds against those of the table."""
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
        """By how much longer rounds of a kind take than plain ones, beside what the table says of both."""
        known = [(abs(size - num_rows.bit_length()), size) for of, size in self._ratios if of == kind]
        return math.exp(self._value((kind, min(known)[1]))) if known else 1.0

    def wants_plain(self, kind: int, apart: float) -> bool:
        """Whether none was seen or wanted for so many rounds; for fewer, where nothing is known of a kind yet."""
        if not any(of == kind for of, _ in self._ratios):
            apart = min(apart, EARLY)
        if self._round - self._last_plain < apart:
            return False
        self._last_plain = self._round
        return True

    def state(self) -> dict[str, Any]:
        """Plain numbers for a later one to start from."""
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


class Trust:
    """Tokens that came beside tokens that were forecast: the best of many estimates is too good on average."""

    def __init__(self, passed: Passed) -> None:
        self._counts = Decayed((2,), HALF_LIFE, passed)  # came, forecast

    @property
    def ratio(self) -> float:
        came, forecast = self._counts.now().tolist()
        return float((came + BELIEVED) / (forecast + BELIEVED))

    def add(self, came: float, forecast: float) -> None:
        self._counts.add(0, came)
        self._counts.add(1, forecast)
