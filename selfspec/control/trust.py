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
        self._age = 0.0  # tokens emitted since they were last faded

    @property
    def ratio(self) -> float:
        self._fade()
        return (self._came + BELIEVED) / (self._forecast + BELIEVED)

    def pass_time(self, tokens: float) -> None:
        self._age += tokens

    def add(self, came: float, forecast: float) -> None:
        self._fade()
        self._came += came
        self._forecast += forecast

    def _fade(self) -> None:
        if self._age and (self._came or self._forecast):
            fade = 0.5 ** (self._age / HALF_LIFE)
            self._came, self._forecast = fade * self._came, fade * self._forecast
        self._age = 0.0
