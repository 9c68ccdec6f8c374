"""Acceptance rates: by exit layer and confidence, and of 4-bit copies of the layers.

They are decayed counts of judged tokens (`Decayed`). An estimate from few counts is shrunk towards one from more
counts: recent counts towards lasting ones, those towards a fitted curve, one layer towards all layers, all of them
towards a prior. A layer without observations has the prior's estimates.
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
LASTING_WEIGHT, CURVE_WEIGHT = 8.0, 20.0  # pseudo-observations of the lasting rates and of the curve
SHARE_WEIGHTS = (8.0, 2.0)  # pseudo-observations of bin shares: the lasting shares, and a uniform distribution
MIN_LASTING = 8.0  # lasting observations per layer below which overall counts are added
CURVE_MEAN, CURVE_VARIANCE = (0.6, 1.0), (4.0, 0.1)  # prior of offset and slope; slope 1: confidence is calibrated
DEPTH_SLOPE = 0.7  # change of the mean offset per unit of log depth; CURVE_MEAN holds at a quarter of the depth
MOST_STEP = 1.5  # largest change of offset or slope in one fit
PRIOR_FITS = 4  # Newton steps after a prior was read
FIT_EVERY = 6  # estimates between two fits; each of the first FIT_EVERY estimates has a fit
PRIOR_SIZE, OVERALL_SIZE = 150.0, 3000.0  # observations per layer of a prior, in the lasting and overall counts

AGREEMENT_HALF_LIFE = 4000.0  # emitted tokens per row; agreement depends on the model more than on the text
AGREEMENT_WEIGHT, EXIT_WEIGHT = 20.0, 10.0  # pseudo-observations: full agreement, and the pooled agreement of one exit
AGREEMENT_KNOWN = 40.0  # expected tokens from which on agreement counts as measured
GOOD_AGREEMENT = 0.9  # agreement from which on rejected tokens of a copy count as misses of the layer
AGREEMENT_PRIOR_SIZE = 100.0  # expected tokens of a prior

_edges = np.array([0.05, *CONFIDENCE_EDGES, 0.9995])
_centres = (_edges[1:] + _edges[:-1]) / 2
LOG_ODDS = np.log(_centres / (1 - _centres))  # [NUM_BINS]
_POWERS = np.stack((LOG_ODDS**0, LOG_ODDS, LOG_ODDS**2), 1)
_VARIANCE = np.array(CURVE_VARIANCE)[:, None]
_RIDGE = np.array((1 / CURVE_VARIANCE[0], 0.0, 1 / CURVE_VARIANCE[1]))[:, None]


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

    Recent counts are shrunk towards lasting counts, and those towards a logistic curve in the log-odds of the
    confidence, with two parameters per layer, fitted to the lasting counts.

    Args:
        prior: the `state` of an earlier tracker of the same model.

    Raises:
        ValueError: `prior` is not such a state.
    """

    def __init__(self, num_layers: int, prior: Any = None) -> None:
        shape = (2, num_layers - 1, NUM_BINS)  # hits, misses
        self._clock = TokenClock()
        self._kept = [Decayed(shape, half_life, self._clock) for half_life in (RECENT, LASTING, OVERALL)]
        self._mean = np.tile(np.array(CURVE_MEAN)[:, None], num_layers - 1)  # [2, L - 1]: offset, slope
        self._mean[0] += DEPTH_SLOPE * np.log(4 * np.arange(1, num_layers) / num_layers)
        self._curve = self._mean.copy()
        self._update_rates()
        self._num_estimates = 0
        if prior is not None:
            counts = read_prior(prior, num_layers)
            self.lasting[:] = _thinned(counts, PRIOR_SIZE)
            self.overall[:] = _thinned(counts, OVERALL_SIZE)
            for _ in range(PRIOR_FITS):
                self._fit()

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
        self._add_overall()
        self._num_estimates += 1
        if self._num_estimates <= FIT_EVERY or self._num_estimates % FIT_EVERY == 0:
            self._fit()
        rates, shares = self._rates, np.full((1, NUM_BINS), 1 / NUM_BINS)
        for counts, weight, share_weight in (
            (self.lasting, CURVE_WEIGHT, SHARE_WEIGHTS[1]),
            (self.recent, LASTING_WEIGHT, SHARE_WEIGHTS[0]),
        ):
            seen = counts[0] + counts[1]
            rates = (counts[0] + weight * rates) / (seen + weight)
            shares = (seen + share_weight * shares) / (np.add.reduce(seen, 1, keepdims=True) + share_weight)
        return np.maximum.accumulate(rates, 1), shares

    def state(self) -> dict[str, Any]:
        """The overall counts as plain numbers, for the `prior` of a later tracker."""
        hits, misses = (counts.round(2).tolist() for counts in self.overall)
        return {"edges": list(CONFIDENCE_EDGES), "hits": hits, "misses": misses}

    def _add_overall(self) -> None:
        """Fill the lasting counts of layers with few observations from their overall counts."""
        lasting = self.lasting
        missing = np.maximum(MIN_LASTING - np.add.reduce(lasting, (0, 2)), 0)
        if missing.any():
            beyond = np.maximum(self.overall - lasting, 0)
            lasting += beyond * np.minimum(missing / np.maximum(np.add.reduce(beyond, (0, 2)), 1e-9), 1)[:, None]

    def _fit(self) -> None:
        """Take one Newton step of every layer's curve towards the lasting counts."""
        hits, misses = self.lasting
        expected = (hits + misses) * self._rates
        # Sums over the bins, `[L - 1, 3]` each: errors, and second derivatives, times 1, x and x^2 of the log-odds x.
        errors, bends = np.array((hits - expected, expected * (1 - self._rates))) @ _POWERS
        offset, slope = errors.T[:2] - (self._curve - self._mean) / _VARIANCE
        a, b, d = bends.T + _RIDGE
        step = np.array((d * offset - b * slope, a * slope - b * offset)) / (a * d - b * b)
        self._curve += np.minimum(np.maximum(step, -MOST_STEP), MOST_STEP)
        self._update_rates()

    def _update_rates(self) -> None:
        """Evaluate the curves at the centres of the bins."""
        offset, slope = self._curve[:, :, None]
        self._rates = 1 / (1 + np.exp(-(offset + slope * LOG_ODDS)))


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
