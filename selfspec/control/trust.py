"""`Trust`: how far forecasts came true; the best of many estimates is too good on average."""

from __future__ import annotations

from selfspec.control.fading import Fading, Passed

BELIEVED = 20.0  # tokens that a forecast is believed for beside what came true
HALF_LIFE = 60.0  # after which that counts half


class Trust(Fading):
    """Tokens that came, and that were forecast, per row; older ones fade."""

    def __init__(self, passed: Passed | None = None) -> None:
        super().__init__(HALF_LIFE, passed)
        self._came = self._forecast = 0.0

    @property
    def ratio(self) -> float:
        self._fade()
        believed = BELIEVED * self._weight
        return (self._came + believed) / (self._forecast + believed)

    def add(self, came: float, forecast: float) -> None:
        self._fade()
        self._came += came * self._weight
        self._forecast += forecast * self._weight

    def _divide(self, by: float) -> None:
        self._came, self._forecast = self._came / by, self._forecast / by
