"""Acceptance rates: by exit layer and confidence, and of 4-bit copies of the layers.

They are decayed counts of judged tokens (`Decayed`). An estimate from few counts is shrunk towards one from more
counts: recent counts towards lasting ones, those towards counts of many texts, those towards a prior. A layer without
observations has the prior's estimates.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.control.plan import CONFIDENCE_EDGES, NUM_BINS
from selfspec.core import ShadowPicks

Floats = NDArray[np.float64]
MAX_HALF_LIVES = 32  # between two rescalings of counts, so that weights do not overflow

RECENT, LASTING, OVERALL = 20.0, 100.0, 2000.0  # half-lives of a layer's counts, in tokens emitted per row
BIN_WEIGHT, LAYER_WEIGHT = 12.0, 4.0  # pseudo-observations of the rates from longer counts: of a bin, and of a layer
SHARE_WEIGHT = 4.0  # pseudo-observations of the bins' shares from longer counts
PRIOR_OFFSET, DEPTH_SLOPE = 0.6, 0.7  # log-odds of acceptance above those of the confidence: at a quarter of the
# depth, and their change per unit of log depth
PRIOR_SIZE, OVERALL_SIZE = 150.0, 3000.0  # observations per layer of a prior, in the lasting and overall counts

AGREEMENT_HALF_LIFE = 4000.0  # emitted tokens per row; agreement depends on the model more than on the text
AGREEMENT_WEIGHT, EXIT_WEIGHT = 20.0, 10.0  # pseudo-observations: full agreement, and the pooled agreement of one exit
AGREEMENT_KNOWN = 40.0  # expected tokens from which on agreement counts as measured
GOOD_AGREEMENT = 0.9  # agreement from which on rejected tokens of a copy count as misses of the layer
AGREEMENT_PRIOR_SIZE = 100.0  # expected tokens of a prior

_edges = np.array([0.05, *CONFIDENCE_EDGES, 0.9995])
_centres = (_edges[1:] + _edges[:-1]) / 2
LOG_ODDS = np.log(_centres / (1 - _centres))  # [NUM_BINS]


class TokenClock:
    """The clock of decayed counts: tokens emitted per row."""

    def __init__(self) -> None:
        self.tokens = 0.0


class Decayed:
    """Counts in which an observation weighs half after `half_life` tokens.

    Instead of decaying all counts at every token, later observations are added with a larger weight. Reading rescales.
    """

    def __init__(self, shape: tuple[int, ...], half_life: float, clock: TokenClock) -> None:
        self.cells = array("d", bytes(8 * math.prod(shape)))
        """The counts, flat and not rescaled. An observation is added to them times `weight`."""
        self._counts: Floats = np.frombuffer(self.cells).reshape(shape)
        self._half_life, self._clock, self._at = half_life, clock, clock.tokens

    @property
    def weight(self) -> float:
        """The weight in `cells` of an observation made now."""
        half_lives = (self._clock.tokens - self._at) / self._half_life
        if half_lives > MAX_HALF_LIVES:
            self.now()
            return 1.0
        return math.exp2(half_lives)

    def add(self, cell: int, amount: float) -> None:
        """Add an observation made now."""
        weight = self.weight  # first, since it may rescale the cells
        self.cells[cell] += weight * amount

    def now(self) -> Floats:
        """The counts, rescaled so that an observation made now is 1: a view that is valid until the clock advances."""
        if self._at != self._clock.tokens:
            self._counts *= 2.0 ** ((self._at - self._clock.tokens) / self._half_life)
            self._at = self._clock.tokens
        return self._counts


class Tracker:
    """Acceptance rate of each layer's picks by confidence. Arrays are `[L - 1, NUM_BINS]`, exit layer e in row e - 1.

    Counts of three half-lives estimate it in turn, from the longest one on. In each, a layer's rates are those of the
    longer counts times what it was right over what these expected; bins with many observations have their own rate.

    Args:
        prior: the `state` of an earlier tracker of the same model.

    Raises:
        ValueError: `prior` is not such a state.
    """

    def __init__(self, num_layers: int, prior: Any = None) -> None:
        shape = (2, num_layers - 1, NUM_BINS)  # hits, misses
        self._clock = TokenClock()
        self._kept = [Decayed(shape, half_life, self._clock) for half_life in (RECENT, LASTING, OVERALL)]
        offsets = PRIOR_OFFSET + DEPTH_SLOPE * np.log(4 * np.arange(1, num_layers) / num_layers)
        self._prior = 1 / (1 + np.exp(-(offsets[:, None] + LOG_ODDS)))
        if prior is not None:
            counts = read_prior(prior, num_layers)
            self.lasting[:] = _thinned(counts, PRIOR_SIZE)
            self.overall[:] = _thinned(counts, OVERALL_SIZE)

    @property
    def recent(self) -> Floats:
        """Hits and misses, `[2, L - 1, NUM_BINS]`, with the half-life `RECENT`."""
        return self._kept[0].now()

    @property
    def lasting(self) -> Floats:
        """Hits and misses with the half-life `LASTING`."""
        return self._kept[1].now()

    @property
    def overall(self) -> Floats:
        """Hits and misses with the half-life `OVERALL`, which spans many texts."""
        return self._kept[2].now()

    def num_lasting(self, layer: int) -> float:
        """The number of lasting observations of a layer."""
        return float(self.lasting[:, layer - 1].sum())

    def add(self, layer: int, hits: Sequence[bool], confidences: Sequence[float]) -> None:
        """Count judged picks of one layer."""
        line, misses = (layer - 1) * NUM_BINS, len(self._kept[0].cells) // 2
        cells = [(counts.cells, counts.weight) for counts in self._kept]
        for hit, confidence in zip(hits, confidences, strict=True):
            at = line + bisect_right(CONFIDENCE_EDGES, confidence) + (0 if hit else misses)
            for counts, weight in cells:
                counts[at] += weight

    def add_draft(self, layer: int, num_right: int, confidences: Sequence[float]) -> None:
        """Count tokens that one layer drafted: the first `num_right` as hits, the others as misses."""
        self.add(layer, [at < num_right for at in range(len(confidences))], confidences)

    def add_shadow(self, shadow: ShadowPicks) -> None:
        """Count the shadow picks of several layers."""
        if not shadow.layers or not shadow.hits.size:
            return
        bins = np.searchsorted(CONFIDENCE_EDGES, shadow.confidences.reshape(-1), "right").reshape(shadow.hits.shape)
        lines = (np.array(shadow.layers)[:, None] - 1) * NUM_BINS
        shape = self.recent.shape
        cells = bins + lines + np.where(shadow.hits, 0, shape[1] * NUM_BINS)
        seen = np.bincount(cells.reshape(-1), minlength=math.prod(shape)).reshape(shape)
        for counts in self._kept:
            current = counts.now()
            current += seen

    def pass_time(self, tokens: float) -> None:
        """Decay all counts by `tokens` emitted tokens per row."""
        self._clock.tokens += tokens

    def estimates(self) -> tuple[Floats, Floats]:
        """Acceptance rate of each bin, ascending along the bins, and share of the picks in each bin."""
        rates, shares = self._prior, np.full((1, NUM_BINS), 1 / NUM_BINS)
        for kept in reversed(self._kept):
            counts = kept.now()
            seen, expected = counts[0] + counts[1], np.array((rates, 1 - rates))
            observed = np.add.reduce(counts, 2, keepdims=True)  # [hits and misses, layers, 1]
            ratios = (observed + LAYER_WEIGHT) / (np.add.reduce(seen * expected, 2, keepdims=True) + LAYER_WEIGHT)
            right, wrong = expected * ratios
            usual = np.where(ratios[0] < 1, right, 1 - wrong)
            rates = (counts[0] + BIN_WEIGHT * usual) / (seen + BIN_WEIGHT)
            shares = (seen + SHARE_WEIGHT * shares) / (observed[0] + observed[1] + SHARE_WEIGHT)
        return np.maximum.accumulate(rates, 1), shares

    def state(self) -> dict[str, Any]:
        """The overall counts as plain numbers, for the `prior` of a later tracker."""
        hits, misses = (counts.round(2).tolist() for counts in self.overall)
        return {"edges": list(CONFIDENCE_EDGES), "hits": hits, "misses": misses}


class Agreement:
    """Acceptance of drafts by 4-bit copies, relative to drafts by the layers themselves.

    The ratio is near 1 for trained models and may be near 0 where logits lie close together.

    Args:
        prior: the `state` of an earlier instance for the same model; anything else is ignored.
    """

    def __init__(self, num_layers: int, clock: TokenClock, prior: Any = None) -> None:
        # [2, L - 1]: accepted tokens of copies, and the accepted tokens expected of the layers
        self._kept = Decayed((2, num_layers - 1), AGREEMENT_HALF_LIFE, clock)
        counts = _counts_of(prior, (2, num_layers - 1))
        if counts is not None:
            self._kept.now()[:] = counts * min(1.0, AGREEMENT_PRIOR_SIZE / max(1.0, float(counts[1].sum())))

    def add(self, exit_layer: int, accepted: float, expected: float) -> None:
        """Count the accepted tokens of a draft by copies, and those expected of a draft by the layers."""
        self._kept.add(exit_layer - 1, accepted)
        self._kept.add(exit_layer - 1 + len(self._kept.cells) // 2, expected)

    @property
    def pooled(self) -> float:
        """The ratio over all exits, at most 1."""
        accepted, expected = self._kept.now().sum(1).tolist()
        return float(min(1.0, (accepted + AGREEMENT_WEIGHT) / (expected + AGREEMENT_WEIGHT)))

    @property
    def is_known(self) -> bool:
        """Whether there are enough observations."""
        return float(self._kept.now()[1].sum()) >= AGREEMENT_KNOWN

    @property
    def is_good(self) -> bool:
        """Whether a rejected token of a copy can count as a miss of the layer."""
        return self.is_known and self.pooled >= GOOD_AGREEMENT

    def ratios(self) -> Floats:
        """The ratio of each exit, `[L - 1]`, at most 1, shrunk towards the pooled ratio."""
        accepted, expected = self._kept.now()
        return np.minimum((accepted + EXIT_WEIGHT * self.pooled) / (expected + EXIT_WEIGHT), 1.0)

    def state(self) -> list[list[float]]:
        """The counts as plain numbers, for the `prior` of a later instance."""
        accepted, expected = self._kept.now().round(2).tolist()
        return [accepted, expected]


def read_prior(given: Any, num_layers: int) -> Floats:
    """Read the counts `[2, L - 1, NUM_BINS]` of a `Tracker.state`.

    Raises:
        ValueError: `given` is no such state, or has another number of layers.
    """
    try:
        counts, has_edges = [given["hits"], given["misses"]], list(given["edges"]) == list(CONFIDENCE_EDGES)
    except (KeyError, TypeError) as problem:
        raise ValueError(f"not a prior: {problem}") from problem
    read = _counts_of(counts, (2, num_layers - 1, NUM_BINS)) if has_edges else None
    if read is None:
        raise ValueError(f"not a prior of a model with {num_layers} layers")
    return read


def is_prior(given: Any, num_layers: int) -> bool:
    """Whether `Tracker(num_layers, given)` accepts this prior."""
    try:
        read_prior(given, num_layers)
        return True
    except ValueError:
        return False


def _counts_of(given: Any, shape: tuple[int, ...]) -> Floats | None:
    """Read saved counts; None where they are not finite numbers of at least 0 in this shape."""
    try:
        counts = np.array(given, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return counts if counts.shape == shape and np.isfinite(counts).all() and (counts >= 0).all() else None


def _thinned(counts: Floats, most: float) -> Floats:
    """Scale counts down to at most `most` observations per layer."""
    total = np.add.reduce(counts, (0, 2))
    return counts * np.minimum(most / np.maximum(total, 1e-9), 1)[None, :, None]
