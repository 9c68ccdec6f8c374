"""`Tracker`: how often each layer would have been right, by how sure it was.

Per exit layer and bin of confidence it keeps two decayed counts of hits and misses: a recent one, of the last tokens,
and a lasting one. Estimates are shrunk: recent to lasting, lasting to a curve with two parameters per layer (a logistic
in the confidence's log-odds, fitted to the lasting counts), the curve to a prior; what a few observations cannot tell
is taken from the next wider view. Layers that were never seen have the prior's estimates, and no division by zero.
Counts over many texts are kept beside them, for the trackers of later texts to start from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.control.plan import CONFIDENCE_EDGES, NUM_BINS, Shadow

Floats = NDArray[np.float64]

RECENT = 20.0  # tokens after which an observation counts half: recent, lasting, and over all texts
LASTING = 100.0
OVERALL = 2000.0
LASTING_WEIGHT = 8.0  # observations the lasting estimate is worth beside the recent ones, and the curve beside those
CURVE_WEIGHT = 20.0
SHARE_WEIGHTS = (8.0, 2.0)  # the same for how often each bin occurs
CURVE_MEAN, CURVE_VARIANCE = (0.6, 1.0), (4.0, 0.1)  # of offset and slope; a slope of 1 takes confidence at its word
DEPTH = 0.7  # by which the mean offset rises per doubling of the depth, in natural logarithms; 0 at a quarter of it
EARLY_FITS, FIT_EVERY = (1, 2, 3, 4, 6, 9), 6  # estimates for which the curves are fitted anew
# Most observations per layer that a saved prior counts for, and that are saved again with what comes.
PRIOR_SIZE, OVERALL_SIZE = 150.0, 3000.0

_RATES = -1 / np.array((RECENT, LASTING, OVERALL))  # by which the three counts fade, in powers of two per token
_bounds = np.array(CONFIDENCE_EDGES)
_edges = np.array([0.05, *CONFIDENCE_EDGES, 0.9995])
_centres = (_edges[1:] + _edges[:-1]) / 2
LOG_ODDS = np.log(_centres / (1 - _centres))  # [NUM_BINS]
_WEIGHTS = np.array((LASTING_WEIGHT, CURVE_WEIGHT))[:, None, None]
_SHARE_WEIGHTS = np.array(SHARE_WEIGHTS)[:, None, None]
_POWERS = np.stack((LOG_ODDS**0, LOG_ODDS, LOG_ODDS**2), 1)  # what the curves' Newton step sums over the bins
_PRECISION = 1 / np.array(CURVE_VARIANCE)[:, None]
_RIDGE = np.array((1 / CURVE_VARIANCE[0], 0.0, 1 / CURVE_VARIANCE[1]))


class Tracker:
    """Statistics of one engine's rows. Arrays are `[L - 1, NUM_BINS]`, exit layer e in row e - 1.

    Args:
        prior: what `state` of an earlier tracker of the same model returned.
    """

    def __init__(self, num_layers: int, prior: Any = None) -> None:
        self._shape = (2, num_layers - 1, NUM_BINS)  # hits, misses
        self._counts = np.zeros((len(_RATES), *self._shape))
        self.recent, self.lasting, self.overall = self._counts  # the last: what later trackers may start from
        self._firsts = np.arange(len(_RATES))[:, None] * self.recent.size  # where they begin in `_counts`
        self._mean = np.tile(np.array(CURVE_MEAN)[:, None], num_layers - 1)  # of offset and slope, [2, L - 1]
        self._mean[0] += DEPTH * np.log(4 * np.arange(1, num_layers) / num_layers)
        self._curve = self._mean.copy()
        self._expected, self._asked = self._curves(), 0
        self._cells: list[int] = []  # of observations not counted yet, in each of the counts; and `_age` then
        self._ages: list[float] = []
        self._lines: dict[tuple[int, ...], NDArray[np.int64]] = {}  # of layers: where their hits begin
        self._age = 0.0  # tokens emitted per row since the counts were last faded
        if prior is not None:
            self.lasting[:], self.overall[:] = (
                read_prior(prior, num_layers, most) for most in (PRIOR_SIZE, OVERALL_SIZE)
            )
            for _ in range(8):
                self._fit()

    def add(self, layer: int, hits: Sequence[bool], confidences: Sequence[float]) -> None:
        """Count picks of one layer."""
        line = (layer - 1) * NUM_BINS
        miss = line + self._shape[1] * NUM_BINS
        for hit, confidence in zip(hits, confidences, strict=True):
            self._cells.append((line if hit else miss) + bisect_right(CONFIDENCE_EDGES, confidence))
        self._ages += [self._age] * len(hits)

    def add_shadow(self, shadow: Shadow) -> None:
        """Count what several layers would have picked."""
        if not shadow.layers or not shadow.hits.size:
            return
        lines = self._lines.get(shadow.layers)
        if lines is None:
            lines = self._lines[shadow.layers] = (np.array(shadow.layers)[:, None] - 1) * NUM_BINS
        cells = np.searchsorted(_bounds, shadow.confidences.reshape(-1), "right").reshape(shadow.hits.shape)
        cells += np.where(shadow.hits, lines, lines + self._shape[1] * NUM_BINS)
        self._cells += cells.reshape(-1).tolist()
        self._ages += [self._age] * cells.size

    def pass_time(self, tokens: float) -> None:
        """Let older observations fade by `tokens` emitted tokens per row."""
        self._age += tokens

    def _settle(self) -> None:
        """Fade the counts and add what is new, once per estimate: rounds are many, and most need none."""
        if self._age:
            self._counts *= np.exp2(self._age * _RATES)[:, None, None, None]
        if self._cells:
            weights = np.exp2(_RATES[:, None] * (self._age - np.array(self._ages)))
            at = (self._firsts + np.array(self._cells)).reshape(-1)
            self._counts += np.bincount(at, weights.reshape(-1), self._counts.size).reshape(self._counts.shape)
            self._cells, self._ages = [], []
        self._age = 0.0

    def estimates(self) -> tuple[Floats, Floats]:
        """(how often a pick of each bin is right, ascending along the bins; how often each bin occurs)."""
        self._settle()
        self._asked += 1
        if self._asked in EARLY_FITS or self._asked % FIT_EVERY == 0:
            self._fit()
        hits, both = self._counts[:2, 0], self._counts[:2, 0] + self._counts[:2, 1]  # [recent or lasting, L - 1, bins]
        seen, totals = both + _WEIGHTS, np.add.reduce(both, 2, keepdims=True) + _SHARE_WEIGHTS
        right = (hits[1] + CURVE_WEIGHT * self._expected) / seen[1]
        right = (hits[0] + LASTING_WEIGHT * right) / seen[0]
        share = (both[1] + SHARE_WEIGHTS[1] / NUM_BINS) / totals[1]
        share = (both[0] + SHARE_WEIGHTS[0] * share) / totals[0]
        return np.maximum.accumulate(right, 1), share

    def mean_confidences(self, layer: int) -> tuple[float, float]:
        """Mean confidence of a layer's lasting hits and of its misses, to the width of a bin; NaN where none."""
        self._settle()
        counts = self.lasting[:, layer - 1]
        totals = counts.sum(1)
        hit, miss = (float(c @ _centres / t) if t > 0 else float("nan") for c, t in zip(counts, totals, strict=True))
        return hit, miss

    def state(self) -> dict[str, Any]:
        """Plain numbers to start a later tracker from."""
        self._settle()
        hits, misses = (counts.round(2).tolist() for counts in self.overall)
        return {"edges": list(CONFIDENCE_EDGES), "hits": hits, "misses": misses}

    def _curves(self) -> Floats:
        offset, slope = self._curve[:, :, None]
        return 1 / (1 + np.exp(-(offset + slope * LOG_ODDS)))

    def _fit(self) -> None:
        """One Newton step of every layer's curve; the next one follows at a later estimate."""
        seen, expected = self.lasting[0] + self.lasting[1], self._expected
        hoped = seen * expected
        gradient = ((self.lasting[0] - hoped) @ _POWERS[:, :2]).T - (self._curve - self._mean) * _PRECISION
        a, b, d = ((hoped - hoped * expected) @ _POWERS + _RIDGE).T
        step = np.stack((d * gradient[0] - b * gradient[1], a * gradient[1] - b * gradient[0])) / (a * d - b * b)
        self._curve += np.clip(step, -1.5, 1.5)
        self._expected = self._curves()


def read_prior(given: Any, num_layers: int, most: float = PRIOR_SIZE) -> Floats:
    """Counts `[2, L - 1, NUM_BINS]` from `Tracker.state`, thinned to `most` observations per layer.

    Raises:
        ValueError: it is something else, or another model's.
    """
    try:
        counts = np.array([given["hits"], given["misses"]], np.float64)
        fits = counts.shape == (2, num_layers - 1, NUM_BINS) and list(given["edges"]) == list(CONFIDENCE_EDGES)
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise ValueError(f"not a prior: {problem}") from problem
    if not fits or not np.isfinite(counts).all() or (counts < 0).any():
        raise ValueError(f"not a prior of a model with {num_layers} layers")
    total = counts.sum((0, 2))
    return counts * (np.minimum(total, most) / np.maximum(total, 1e-9))[None, :, None]


def is_prior(given: Any, num_layers: int) -> bool:
    """Whether a tracker of a model of this depth can start from it."""
    try:
        read_prior(given, num_layers)
        return True
    except ValueError:
        return False
