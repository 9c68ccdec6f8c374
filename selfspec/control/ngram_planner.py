"""How many tokens to draft by lookup after which match: one table per row, for batches of any size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selfspec.control.decay import Floats
from selfspec.control.ngram_stats import LEAST_CHANCE, MOST_FOUND, SHORTEST
from selfspec.control.plan import LookupTable, match_bin
from selfspec.control.round_costs import MOST_PACKED, RoundCosts

TYPICAL = 8  # drafted tokens per row around which one more token is priced
# [bins, MOST_FOUND]: every further token of a draft follows a longer match.
_BINS = np.array([[match_bin(match + at) for at in range(MOST_FOUND)] for match in SHORTEST])


def table(
    rates: Sequence[Sequence[float]], costs: RoundCosts, usual: float, trust: float, most: int = MOST_FOUND
) -> LookupTable | None:
    """The drafts of all rows; None where no draft promises more than is usual.

    Args:
        rates: per row and bin, how likely the token that followed a match is to come again.
        usual: tokens per second of all rows without lookup.
        trust: by what forecasts of drafts by lookup are multiplied.
        most: longest draft of a row.
    """
    count, seconds = len(rates), np.array(costs.lookups())
    needs = usual * seconds / trust - count
    if not (needs < np.arange(len(needs))).any():
        return None  # not even if every draft were right
    chances = np.cumprod(np.array(rates)[:, _BINS], 2)  # [rows, bins, MOST_FOUND]: right as far as each token
    lengths, gains = (
        _single(chances, seconds, needs, most) if count == 1 else _shared(chances, seconds, usual / trust, most)
    )
    if not lengths.any():
        return None
    return LookupTable(tuple(map(tuple, lengths.tolist())), tuple(map(tuple, gains.tolist())), tuple(needs.tolist()))


def _single(chances: Floats, seconds: Floats, needs: Floats, most: int) -> tuple[Floats, Floats]:
    """The length of most tokens per second, where that is more than is usual."""
    most = min(most, len(seconds) - 1)
    gained = np.cumsum(np.where(chances < LEAST_CHANCE, 0.0, chances)[:, :, :most], 2)
    best = ((1 + gained) / seconds[1 : most + 1]).argmax(2)
    gains = np.take_along_axis(gained, best[:, :, None], 2)[:, :, 0]
    pays = gains >= needs[best + 1]
    return np.where(pays, best + 1, 0), np.where(pays, gains, 0.0)


def _shared(chances: Floats, seconds: Floats, usual: float, most: int) -> tuple[Floats, Floats]:
    """Every token that is as likely to be right as is worth its own time; the round is paid for by all rows."""
    count = len(chances)
    typical = min(TYPICAL * count, len(seconds) - 1)
    each = usual * (seconds[typical] - seconds[1]) / max(1, typical - 1)
    chances = chances[:, :, : min(most, MOST_PACKED // count)]
    kept = chances >= max(LEAST_CHANCE, each)
    return kept.sum(2), (chances * kept).sum(2)
