"""`Sampling`: how a row picks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from selfspec.errors import got, is_number, whole

LEAST_TEMPERATURE = 1e-6
MAX_NGRAM = 1 << 16


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row picks: the field's usual names.

    Penalties come first, see `selfspec.executors.penalties`; then the request's logits processors; then temperature,
    top-k, top-p and min-p, in transformers' order.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of likeliest tokens with this probability
    min_p: float = 0.0  # keep tokens at least this likely relative to the likeliest
    seed: int = 0
    repetition_penalty: float = 1.0  # above 0: divides logits of tokens in prompt and output, multiplies negative ones
    presence_penalty: float = 0.0  # -2..2: is subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # -2..2: likewise, once for each time that the output holds the token
    no_repeat_ngram_size: int = 0  # no n tokens stand twice in prompt and output; 0 allows all

    def __post_init__(self) -> None:
        if not (is_number(self.temperature) and math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a number of at least 0 (0 is greedy), {got(self.temperature)}")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, below which logits overflow, "
                f"got {self.temperature}"
            )
        if whole("top_k", self.top_k) < 0:
            raise ValueError(f"top_k must be at least 0 (0 keeps all tokens), got {self.top_k}")
        if not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must lie in (0, 1] (1 keeps all tokens), {got(self.top_p)}")
        if not (is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"min_p must lie in [0, 1] (0 keeps all tokens), {got(self.min_p)}")
        if not -(1 << 63) <= whole("seed", self.seed) < 1 << 63:
            raise ValueError(f"seed must be a 64-bit integer, got {self.seed}")
        if not (is_number(self.repetition_penalty) and 0 < self.repetition_penalty < math.inf):
            raise ValueError(
                f"repetition_penalty must be a number above 0 (1 changes nothing), {got(self.repetition_penalty)}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not (is_number(value) and -2 <= value <= 2):
                raise ValueError(f"{name} must be a number in [-2, 2] (0 changes nothing), {got(value)}")
        if not 0 <= whole("no_repeat_ngram_size", self.no_repeat_ngram_size) <= MAX_NGRAM:
            raise ValueError(
                f"no_repeat_ngram_size must lie in 0..{MAX_NGRAM} (0 allows all), got {self.no_repeat_ngram_size}"
            )

    @property
    def filters(self) -> tuple[float, int, float, float]:
        return (self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def penalties(self) -> tuple[float, float, float, int]:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.no_repeat_ngram_size)

    @property
    def penalizes(self) -> bool:
        """Whether its picks depend on which tokens the row holds."""
        return self.penalties != (1.0, 0.0, 0.0, 0)
