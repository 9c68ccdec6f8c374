"""What measured costs imply: how far to draft at each batch size, and what it gains (the table of arXiv 2310.18813)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from selfspec.control.costs import Costs

ACCEPTANCE = (0.5, 0.6, 0.7, 0.8, 0.9)  # rates assumed where none were seen
LONGEST = 16  # drafted tokens per round
ENOUGH = 20  # observations of a layer


@dataclass(frozen=True, slots=True)
class Choice:
    """The best draft length for a batch, an exit layer and an acceptance rate; none drafted: plain decoding wins."""

    batch_size: int
    exit_layer: int
    acceptance: float
    num_speculative_tokens: int
    speedup: float  # of expected tokens per second, over plain decoding


def expected_tokens(acceptance: float, num_speculative_tokens: int) -> float:
    """Tokens per round when every drafted token is right with one probability (arXiv 2211.17192): 1 + a + a^2 + ..."""
    return sum(acceptance**i for i in range(num_speculative_tokens + 1))


def choose(costs: Costs, batch_size: int, exit_layer: int, acceptance: float) -> Choice:
    """The draft length with the most expected tokens per second; all rows draft alike."""
    plain = costs.plain_round(batch_size)
    best, speedup = 0, 1.0
    for length in range(1, LONGEST + 1):
        seconds = costs.round(exit_layer, (length,) * batch_size)
        gained = expected_tokens(acceptance, length) * plain / seconds
        if gained > speedup:
            best, speedup = length, gained
    return Choice(batch_size, exit_layer, acceptance, best, speedup)


def exits_of(num_layers: int) -> list[int]:
    """An eighth, a quarter and half of the layers."""
    return sorted({max(1, num_layers // part) for part in (8, 4, 2)})


def assumed(costs: Costs, batch_sizes: Iterable[int]) -> list[Choice]:
    """Every batch size, exit layer and assumed rate."""
    exits = exits_of(costs.num_layers)
    return [choose(costs, rows, e, rate) for rows in batch_sizes for e in exits for rate in ACCEPTANCE]


def seen(costs: Costs, batch_sizes: Iterable[int], rates: Mapping[int, float]) -> list[Choice]:
    """The best exit layer for every batch size, by the rates of this very model."""
    return [
        max((choose(costs, rows, e, rate) for e, rate in rates.items()), key=lambda choice: choice.speedup)
        for rows in (batch_sizes if rates else ())
    ]


def rates_of(prior: Mapping[str, Any] | None, num_layers: int) -> dict[int, float]:
    """Acceptance by exit layer from a saved prior (see `Tracker.state`), for layers that were seen often enough."""
    try:
        counts = [(sum(hits), sum(misses)) for hits, misses in zip(prior["hits"], prior["misses"], strict=True)]  # type: ignore[index]
        rates = {e: hits / (hits + misses) for e, (hits, misses) in enumerate(counts, 1) if hits + misses >= ENOUGH}
    except (KeyError, TypeError, ValueError):  # no prior, or of another kind: the assumed rates remain
        return {}
    return {e: rate for e, rate in rates.items() if e < num_layers and 0 <= rate <= 1}
