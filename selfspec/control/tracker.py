"""`Tracker`: how often each layer would have been right, by how sure it was.

Per exit layer and bin of confidence it keeps two decayed counts of hits and misses: a recent one, of the last tokens,
and a lasting one. Estimates are shrunk: recent to lasting, lasting to a curve with two parameters per layer (a logistic
in the confidence's log-odds, fitted to the lasting counts), the curve to a prior; what a few observations cannot tell
is taken from the next wider view. Layers that were never seen have the prior's estimates, and no division by zero.
Counts over many texts are kept beside them, for the trackers of later texts to start from, and for layers that were
long not seen: of those, as much of them is lasting as a few observations.

What comes is counted when somebody asks; how often anybody does changes no more than the last bits.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.control.plan import CONFIDENCE_EDGES, NUM_BINS
from selfspec.control.priors import read_curve, read_prior, thinned
from selfspec.control.rows import Shadow

Floats = NDArray[np.float64]

RECENT = 20.0  # tokens after which an observation counts half: recent, lasting, and over all texts
LASTING = 100.0
OVERALL = 2000.0
HALF_LIVES = RECENT, LASTING, OVERALL
RECALLED = 8.0  # lasting observations of a layer from which on nothing is taken from all texts in their place
LASTING_WEIGHT = 8.0  # observations the lasting estimate is worth beside the recent ones, and the curve beside those
CURVE_WEIGHT = 20.0
SHARE_WEIGHTS = (8.0, 2.0)  # the same for how often each bin occurs
CURVE_MEAN, CURVE_VARIANCE = (0.6, 1.0), (4.0, 0.1)  # of offset and slope; a slope of 1 takes confidence at its word
DEPTH = 0.7  # by which the mean offset rises per doubling of the depth, in natural logarithms; 0 at a quarter of it
EARLY_FITS, FIT_EVERY = (1, 2, 3, 4, 6, 9), 6  # estimates for which the curves are fitted anew
# Most observations per layer that a saved prior counts for, and that are saved again with what comes.
PRIOR_SIZE, OVERALL_SIZE = 150.0, 3000.0

FITS, FITS_FROM_CURVE = 8, 2  # of the curves to a prior, from nothing and from where they were
MOST_STEP = 1.5  # by which a fit moves offset or slope
MOST_WAITING = 4096  # observations that wait to be counted
BOUNDS = np.array(CONFIDENCE_EDGES)
_edges = np.array([0.05, *CONFIDENCE_EDGES, 0.9995])
_centres = (_edges[1:] + _edges[:-1]) / 2
LOG_ODDS = np.log(_centres / (1 - _centres))  # [NUM_BINS]
# Observations that the next wider view is worth: beside recent and lasting ones, [2, rates or shares, 1, 1].
WEIGHTS = np.array(((LASTING_WEIGHT, SHARE_WEIGHTS[0]), (CURVE_WEIGHT, SHARE_WEIGHTS[1])))[:, :, None, None]
_POWERS = np.stack((LOG_ODDS**0, LOG_ODDS, LOG_ODDS**2), 1)  # what the curves' Newton step sums over the bins
PRECISION = 1 / np.array(CURVE_VARIANCE)[:, None]
_RIDGE = np.array((1 / CURVE_VARIANCE[0], 0.0, 1 / CURVE_VARIANCE[1]))[:, None]


class Tracker:
    """Statistics of one engine's rows. Arrays are `[L - 1, NUM_BINS]`, exit layer e in row e - 1.

    Args:
        prior: what `state` of an earlier tracker of the same model returned.
    """

    def __init__(self, num_layers: int, prior: Any = None) -> None:
        self._shape = (2, num_layers - 1, NUM_BINS)  # hits, misses
        # Recent counts, lasting ones, and those over all texts, as of when they were last faded.
        self._counts = np.zeros((3, *self._shape))
        self._clock = self._counted_at = 0.0  # tokens emitted per row, ever, and when that was
        # What is not counted yet: single observations, by where they are counted, and of what `_clock`; and drafts,
        # by where their layer's hits begin, tokens told of and first ones that are hits, with all their confidences.
        # Whoever is interrupted may be asked for what it knows all the same, and what waits is read as far as `_cells`
        # and `_drafts_at` go: these grow last and shrink first.
        self._cells, self._cells_at = array("q"), array("d")
        self._drafts, self._drafts_at, self._sure = array("q"), array("d"), array("d")
        self._mean = _mean_curve(num_layers)
        known = None if prior is None else read_curve(prior, num_layers)
        self._curve = self._mean.copy() if known is None else known
        self._wider = np.full(self._shape, SHARE_WEIGHTS[1] / NUM_BINS)  # of rates and of shares, with its weight
        self._expected = np.empty(self._shape[1:])  # rates by the curves
        self._asked = self._fits = 0  # estimates, and fits that the next one makes up for
        self._draw_curves()
        self._lines: dict[tuple[int, ...], NDArray[np.int64]] = {}  # of layers: where their hits begin
        if prior is not None:
            counts = read_prior(prior, num_layers)
            self._counts[1], self._counts[2] = thinned(counts, PRIOR_SIZE), thinned(counts, OVERALL_SIZE)
            self._fits, self._asked = FITS if known is None else FITS_FROM_CURVE, EARLY_FITS[-1]

    @property
    def recent(self) -> Floats:
        """`[2, L - 1, NUM_BINS]`: hits and misses of the last tokens."""
        self._settle()
        return self._counts[0]

    @property
    def lasting(self) -> Floats:
        """The same of more of them; or else, where somebody asked for estimates since, of all texts."""
        self._settle()
        return self._counts[1]

    @property
    def overall(self) -> Floats:
        """The same over many texts."""
        self._settle()
        return self._counts[2]

    def num_lasting(self, layer: int) -> float:
        """How many of the lasting ones are of one layer."""
        if self._cells or self._drafts_at:
            self._settle()
        hits, misses = self._counts[1, :, layer - 1].tolist()
        return (sum(hits) + sum(misses)) * float(2 ** ((self._counted_at - self._clock) / LASTING))

    def add(self, layer: int, hits: Sequence[bool], confidences: Sequence[float]) -> None:
        """Count picks of one layer."""
        line = (layer - 1) * NUM_BINS
        lines = line, line + self._shape[1] * NUM_BINS
        told = zip(hits, confidences, strict=True)
        self._add([lines[not hit] + bisect_right(CONFIDENCE_EDGES, confidence) for hit, confidence in told])

    def add_draft(self, layer: int, num_right: int, confidences: Sequence[float]) -> None:
        """Count tokens that one layer drafted, of which the first `num_right` were hits, and others misses."""
        if not confidences:
            return
        self._sure.extend(confidences)
        self._drafts.extend(((layer - 1) * NUM_BINS, len(confidences), num_right))
        self._drafts_at.append(self._clock)
        if len(self._sure) > MOST_WAITING:
            self._settle()

    def add_shadow(self, shadow: Shadow) -> None:
        """Count what several layers would have picked."""
        if not shadow.layers or not shadow.hits.size:
            return
        lines = self._lines.get(shadow.layers)
        if lines is None:
            lines = self._lines[shadow.layers] = (np.array(shadow.layers)[:, None] - 1) * NUM_BINS
        cells = np.searchsorted(BOUNDS, shadow.confidences.reshape(-1), "right").reshape(shadow.hits.shape)
        cells += np.where(shadow.hits, lines, lines + self._shape[1] * NUM_BINS)
        self._add(cells.reshape(-1).tolist())

    def _add(self, cells: Sequence[int]) -> None:
        self._cells_at.extend([self._clock] * len(cells))
        self._cells.extend(cells)
        if len(self._cells) > MOST_WAITING:
            self._settle()

    def pass_time(self, tokens: float) -> None:
        """Let older observations fade by `tokens` emitted tokens per row."""
        self._clock += tokens

    def _settle(self) -> None:
        """Count what waits, and fade all counts, so that an observation now counts for 1."""
        since = self._clock - self._counted_at
        if not (since or self._cells or self._drafts_at):
            return
        cells, at = self._waiting()
        for counts, half_life in zip(self._counts, HALF_LIVES, strict=True):
            counts *= 2 ** (-since / half_life)
            if len(cells):
                weights = np.exp2((at - self._clock) / half_life)
                counts += np.bincount(cells, weights, counts.size).reshape(self._shape)
        self._forget_waiting()

    def _waiting(self) -> tuple[NDArray[np.int64], Floats]:
        """Where what waits is to be counted, and when it came."""
        cells, at = np.array(self._cells), np.array(self._cells_at)[: len(self._cells)]
        if not self._drafts_at:
            return cells, at
        begin, told, right = np.array(self._drafts)[: 3 * len(self._drafts_at)].reshape(-1, 3).T
        sure = np.array(self._sure)[: told.sum()]
        place = np.arange(len(sure)) - np.repeat(np.cumsum(told) - told, told)  # in its draft
        drafted = np.repeat(begin, told) + np.searchsorted(BOUNDS, sure, "right")
        drafted += np.where(place < np.repeat(right, told), 0, self._shape[1] * NUM_BINS)
        return np.concatenate((cells, drafted)), np.concatenate((at, np.repeat(np.array(self._drafts_at), told)))

    def _forget_waiting(self) -> None:
        """All of it is counted, as of now."""
        for told in (self._cells, self._drafts_at, self._cells_at, self._drafts, self._sure):
            del told[:]
        self._counted_at = self._clock

    def _recall(self) -> None:
        """Of a layer that little is lasting of, take as much from what all texts have told."""
        lasting = self._counts[1]
        missing = np.maximum(RECALLED - np.add.reduce(lasting, (0, 2)), 0)
        if missing.any():
            beyond = np.maximum(self._counts[2] - lasting, 0)
            told = np.maximum(np.add.reduce(beyond, (0, 2)), 1e-9)
            lasting += beyond * np.minimum(missing / told, 1)[:, None]

    def _fits_now(self) -> int:
        """Somebody asks: how many steps the curves are fitted to what has come."""
        self._asked += 1
        fits, self._fits = self._fits + (self._asked in EARLY_FITS or self._asked % FIT_EVERY == 0), 0
        return fits

    def estimates(self) -> tuple[Floats, Floats]:
        """(how often a pick of each bin is right, ascending along the bins; how often each bin occurs)."""
        self._settle()
        self._recall()
        for _ in range(self._fits_now()):
            self._fit()
        # [recent or lasting, rates or shares, L - 1, bins]: what is counted, and out of how many
        counted, of = np.empty((2, 2, *self._shape))
        hits, misses = self._counts[:2, 0], self._counts[:2, 1]
        counted[:, 0] = hits
        seen = np.add(hits, misses, out=counted[:, 1])
        of[:, 0] = seen
        of[:, 1] = np.add.reduce(seen, 2, keepdims=True)
        of += WEIGHTS
        found = (counted[1] + self._wider) / of[1]
        found *= WEIGHTS[0]
        found += counted[0]
        found /= of[0]
        right, share = found
        return np.maximum.accumulate(right, 1), share

    def mean_confidences(self, layer: int) -> tuple[float, float]:
        """Mean confidence of a layer's lasting hits and of its misses, to the width of a bin; NaN where none."""
        counts = self.lasting[:, layer - 1]
        totals = counts.sum(1)
        hit, miss = (float(c @ _centres / t) if t > 0 else float("nan") for c, t in zip(counts, totals, strict=True))
        return hit, miss

    def state(self) -> dict[str, Any]:
        """Plain numbers to start a later tracker from."""
        self._settle()
        fits, self._fits = self._fits, 0
        for _ in range(fits):
            self._fit()
        hits, misses = (counts.round(2).tolist() for counts in self.overall)
        return {"edges": list(CONFIDENCE_EDGES), "hits": hits, "misses": misses, "curve": self._curve.round(3).tolist()}

    def _draw_curves(self) -> None:
        offset, slope = self._curve[:, :, None]
        self._expected[:] = 1 / (1 + np.exp(-(offset + slope * LOG_ODDS)))
        np.multiply(CURVE_WEIGHT, self._expected, out=self._wider[0])

    def _fit(self) -> None:
        """One Newton step of every layer's curve; the next one follows at a later estimate."""
        hits, misses = self._counts[1]
        expected, sums = self._expected, np.empty(self._shape)
        hoped = (hits + misses) * expected
        np.subtract(hits, hoped, out=sums[0])
        np.subtract(hoped, hoped * expected, out=sums[1])
        slopes, bends = (sums @ _POWERS).transpose(0, 2, 1)  # [3, L - 1] each; of the first, the last is not used
        first, second = slopes[:2] - (self._curve - self._mean) * PRECISION
        a, b, d = bends + _RIDGE
        step = np.empty(self._curve.shape)
        step[0], step[1] = d * first - b * second, a * second - b * first
        step /= a * d - b * b
        self._curve += np.minimum(np.maximum(step, -MOST_STEP), MOST_STEP)
        self._draw_curves()


@lru_cache(maxsize=8)
def _mean_curve(num_layers: int) -> Floats:
    """Of offset and slope, `[2, L - 1]`; not to be written to."""
    mean = np.tile(np.array(CURVE_MEAN)[:, None], num_layers - 1)
    mean[0] += DEPTH * np.log(4 * np.arange(1, num_layers) / num_layers)
    mean.setflags(write=False)
    return mean
