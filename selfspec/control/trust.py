"""`Trust`: how far forecasts came true; the best of many estimates is too good on average."""

from __future__ import annotations

BELIEVED, HALF_LIFE = (
    20.0,
    60.0,
)  # tokens a forecast is believed for beside what came true; after which that counts half


class Trust:
    """Tokens that came, and that were forecast, per row; older ones fade."""

    def __init__(self) -> None:
        self._came = self._forecast = 0.0

    @property
    def ratio(self) -> float:
        return (self._came + BELIEVED) / (self._forecast + BELIEVED)

    def pass_time(self, tokens: float) -> None:
        fade = 0.5 ** (tokens / HALF_LIFE)
        self._came, self._forecast = fade * self._came, fade * self._forecast

    def add(self, came: float, forecast: float) -> None:
        self._came += came
        self._forecast += forecast
