"""How often drafts are right: by exit layer and confidence, by 4-bit copies of the layers, and by second choices.

All of it is counted in tokens that the target judged, and older ones count less (`Decayed`). Estimates from few counts
are shrunk to those of the next wider view: recent counts to lasting ones, a layer to all layers, both to a prior. So
nothing is divided by zero, and a layer that was never seen has the prior's estimates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from selfspec.control.decay import Decayed, Floats, Passed
from selfspec.control.plan import CONFIDENCE_EDGES, NUM_BINS, SecondChoices, confidence_bin
from selfspec.control.rows import Shadow

RECENT, LASTING, OVERALL = 20.0, 100.0, 2000.0  # half-lives of a layer's counts, in tokens emitted per row
LASTING_WEIGHT, CURVE_WEIGHT = 8.0, 20.0  # observations that lasting rates, and the curve's, count as
SHARE_WEIGHTS = (8.0, 2.0)  # the same for how often each bin occurs: the lasting share, and an equal one
RECALLED = 8.0  # lasting observations of a layer; where there are fewer, older ones are recalled
CURVE_MEAN, CURVE_VARIANCE = (0.6, 1.0), (4.0, 0.1)  # of offset and slope; a slope of 1 takes confidence at its word
DEPTH_SLOPE = 0.7  # by which the mean offset rises where the depth grows e-fold; it is CURVE_MEAN at a quarter of it
MOST_STEP = 1.5  # by which a fit moves offset or slope
PRIOR_FITS = 4  # Newton steps to a prior
FIT_EVERY = 6  # estimates between two steps later on; the first so many have one each
PRIOR_SIZE, OVERALL_SIZE = 150.0, 3000.0  # observations per layer that a prior counts for, lasting and overall

AGREEMENT_HALF_LIFE = 4000.0  # it depends on the model more than on the text
AGREEMENT_WEIGHT, EXIT_WEIGHT = 20.0, 10.0  # tokens that full agreement counts as, and the mean of all exits for one
AGREEMENT_KNOWN = 40.0  # tokens from which on it is known
GOOD_AGREEMENT = 0.9  # from which on a copy's misses are the layer's
AGREEMENT_PRIOR_SIZE = 100.0  # tokens that a prior counts for

SECOND_EDGES = (0.35, 0.6)  # bounds between the groups of confidences of first choices
SECOND_PRIOR, SECOND_WEIGHT = (0.2, 0.35, 0.5), 8.0  # rates of second choices, and observations that they count as
SECOND_HALF_LIFE = 200.0

_edges = np.array([0.05, *CONFIDENCE_EDGES, 0.9995])
_centres = (_edges[1:] + _edges[:-1]) / 2
LOG_ODDS = np.log(_centres / (1 - _centres))  # [NUM_BINS]
_POWERS = np.stack((LOG_ODDS**0, LOG_ODDS, LOG_ODDS**2), 1)
_VARIANCE = np.array(CURVE_VARIANCE)[:, None]
_RIDGE = np.array((1 / CURVE_VARIANCE[0], 0.0, 1 / CURVE_VARIANCE[1]))[:, None]
_SECOND_GROUPS = [bisect_right(SECOND_EDGES, edge) for edge in (0.0, *CONFIDENCE_EDGES)]  # of every confidence bin


class Tracker:
    """How often each layer's picks are right, by its confidence; arrays are `[L - 1, NUM_BINS]`, exit layer e at e - 1.

    Estimates come from recent counts, shrunk to lasting ones, shrunk to a curve with two parameters per layer: a
    logistic in the log-odds of the confidence, fitted to the lasting counts.

    Args:
        prior: what `state` of an earlier tracker of the same model returned.

    Raises:
        ValueError: the prior is something else.
    """

    def __init__(self, num_layers: int, prior: Any = None) -> None:
        shape = (2, num_layers - 1, NUM_BINS)  # hits, misses
        self._clock = Passed()
        self._kept = [Decayed(shape, half_life, self._clock) for half_life in (RECENT, LASTING, OVERALL)]
        self._mean = np.tile(np.array(CURVE_MEAN)[:, None], num_layers - 1)  # [2, L - 1]: offset, slope
        self._mean[0] += DEPTH_SLOPE * np.log(4 * np.arange(1, num_layers) / num_layers)
        self._curve = self._mean.copy()
        self._draw()
        self._num_asked = 0  # estimates
        if prior is not None:
            counts = read_prior(prior, num_layers)
            self.lasting[:] = _thinned(counts, PRIOR_SIZE)
            self.overall[:] = _thinned(counts, OVERALL_SIZE)
            for _ in range(PRIOR_FITS):
                self._fit()

    @property
    def recent(self) -> Floats:
        """`[2, L - 1, NUM_BINS]`: hits and misses of the last tokens."""
        return self._kept[0].now()

    @property
    def lasting(self) -> Floats:
        """The same of more of them."""
        return self._kept[1].now()

    @property
    def overall(self) -> Floats:
        """The same over many texts."""
        return self._kept[2].now()

    def num_lasting(self, layer: int) -> float:
        """How many of the lasting ones are of one layer."""
        return float(self.lasting[:, layer - 1].sum())

    def add(self, layer: int, hits: Sequence[bool], confidences: Sequence[float]) -> None:
        """Count picks of one layer."""
        line, misses = (layer - 1) * NUM_BINS, len(self._kept[0].cells) // 2
        cells = [(counts.cells, counts.weight) for counts in self._kept]
        for hit, confidence in zip(hits, confidences, strict=True):
            at = line + bisect_right(CONFIDENCE_EDGES, confidence) + (0 if hit else misses)
            for counts, weight in cells:
                counts[at] += weight

    def add_draft(self, layer: int, num_right: int, confidences: Sequence[float]) -> None:
        """Count tokens that one layer drafted, of which the first `num_right` were hits, and others misses."""
        self.add(layer, [at < num_right for at in range(len(confidences))], confidences)

    def add_shadow(self, shadow: Shadow) -> None:
        """Count what several layers would have picked."""
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
        """Let older observations fade by `tokens` emitted tokens per row."""
        self._clock.tokens += tokens

    def estimates(self) -> tuple[Floats, Floats]:
        """(how often a pick of each bin is right, ascending along the bins; how often each bin occurs)."""
        self._recall()
        self._num_asked += 1
        if self._num_asked <= FIT_EVERY or self._num_asked % FIT_EVERY == 0:
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
        """Plain numbers to start a later tracker from."""
        hits, misses = (counts.round(2).tolist() for counts in self.overall)
        return {"edges": list(CONFIDENCE_EDGES), "hits": hits, "misses": misses}

    def _recall(self) -> None:
        """Of a layer that little is lasting of, take as much from what all texts have shown."""
        lasting = self.lasting
        missing = np.maximum(RECALLED - np.add.reduce(lasting, (0, 2)), 0)
        if missing.any():
            beyond = np.maximum(self.overall - lasting, 0)
            lasting += beyond * np.minimum(missing / np.maximum(np.add.reduce(beyond, (0, 2)), 1e-9), 1)[:, None]

    def _fit(self) -> None:
        """One Newton step of every layer's curve to the lasting counts; the next one follows at a later estimate."""
        hits, misses = self.lasting
        expected = (hits + misses) * self._rates
        # Sums over the bins, [L - 1] each: of errors, of errors by log-odds; and of their slopes by 1, x and x^2.
        errors, bends = np.array((hits - expected, expected * (1 - self._rates))) @ _POWERS
        offset, slope = errors.T[:2] - (self._curve - self._mean) / _VARIANCE
        a, b, d = bends.T + _RIDGE
        step = np.array((d * offset - b * slope, a * slope - b * offset)) / (a * d - b * b)
        self._curve += np.minimum(np.maximum(step, -MOST_STEP), MOST_STEP)
        self._draw()

    def _draw(self) -> None:
        """Rates by the curves."""
        offset, slope = self._curve[:, :, None]
        self._rates = 1 / (1 + np.exp(-(offset + slope * LOG_ODDS)))


class Agreement:
    """How often copies of the layers are right where the layers would be.

    Rounding costs little of a model that was trained, and may cost nearly all of one whose logits lie close together.

    Args:
        prior: what `state` of an earlier one of the same model returned; anything else is passed over.
    """

    def __init__(self, num_layers: int, passed: Passed, prior: Any = None) -> None:
        # [2, L - 1]: tokens that copies had right, and as many as the layers would have had right
        self._kept = Decayed((2, num_layers - 1), AGREEMENT_HALF_LIFE, passed)
        counts = _counts_of(prior, (2, num_layers - 1))
        if counts is not None:
            self._kept.now()[:] = counts * min(1.0, AGREEMENT_PRIOR_SIZE / max(1.0, float(counts[1].sum())))

    def add(self, exit_layer: int, came: float, expected: float) -> None:
        """Count tokens of a draft by copies that were right, and as many as the layers would have had right."""
        self._kept.add(exit_layer - 1, came)
        self._kept.add(exit_layer - 1 + len(self._kept.cells) // 2, expected)

    @property
    def pooled(self) -> float:
        """Of all exits together, at most 1."""
        came, expected = self._kept.now().sum(1).tolist()
        return float(min(1.0, (came + AGREEMENT_WEIGHT) / (expected + AGREEMENT_WEIGHT)))

    @property
    def is_known(self) -> bool:
        """Whether it comes from tokens that came rather than from what is believed at first."""
        return float(self._kept.now()[1].sum()) >= AGREEMENT_KNOWN

    @property
    def is_good(self) -> bool:
        """Whether it is known that what copies get wrong, the layers mostly would, too."""
        return self.is_known and self.pooled >= GOOD_AGREEMENT

    def ratios(self) -> Floats:
        """`[L - 1]`, at most 1: each exit's, shrunk to that of all of them."""
        came, expected = self._kept.now()
        return np.minimum((came + EXIT_WEIGHT * self.pooled) / (expected + EXIT_WEIGHT), 1.0)

    def state(self) -> list[list[float]]:
        """Plain numbers for a later one to start from."""
        came, expected = self._kept.now().round(2).tolist()
        return [came, expected]


class SecondRates:
    """How often a layer's second choice is right where its first is wrong, by how sure that was.

    What is seen of a layer is shrunk to what is seen of all of them. Where the first choice is sure, nothing but the
    second may be left; where it is not, there are many others.
    """

    def __init__(self, num_layers: int) -> None:
        self._clock = Passed()
        # [layers, 2, groups]: right ones, and all; of all layers together at 0
        self._kept = Decayed((num_layers, 2, len(SECOND_PRIOR)), SECOND_HALF_LIFE, self._clock)

    def pass_time(self, tokens: float) -> None:
        """Let older observations fade by `tokens` emitted tokens per row."""
        self._clock.tokens += tokens

    def add(self, layer: int, confidence: float, is_right: bool) -> None:
        """Count one, beside a first choice of this confidence."""
        counts, group = self._kept.now(), bisect_right(SECOND_EDGES, confidence)
        for line in (0, layer):
            counts[line, :, group] += (is_right, 1.0)

    def of(self, layer: int) -> tuple[float, ...]:
        """By confidence bin of the first choice."""
        counts, rates = self._kept.now(), np.array(SECOND_PRIOR)
        for right, seen in (counts[0], counts[layer]):
            rates = (right + SECOND_WEIGHT * rates) / (seen + SECOND_WEIGHT)
        by_group = rates.tolist()
        return tuple([by_group[group] for group in _SECOND_GROUPS])


def likely_seconds(rule: SecondChoices, confidences: Sequence[float], most: int) -> list[int]:
    """Beside which tokens of a draft, counted from 0, to draft the second choice: at most so many, the likeliest."""
    offers, survival = [], 1.0
    for at, confidence in enumerate(confidences):
        column = confidence_bin(confidence)
        offers.append((survival * (1 - rule.right[column]) * rule.second[column], -at))
        survival *= rule.right[column]
    offers.sort(reverse=True)
    found = [(chance, -at) for chance, at in offers[: max(0, most)] if chance > rule.least]
    if sum(chance - rule.least for chance, _ in found) <= rule.enough:
        return []
    return sorted(at for _, at in found)


def read_prior(given: Any, num_layers: int) -> Floats:
    """Counts `[2, L - 1, NUM_BINS]` from `Tracker.state`.

    Raises:
        ValueError: it is something else, or another model's.
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
    """Whether a tracker of a model of this depth can start from it."""
    try:
        read_prior(given, num_layers)
        return True
    except ValueError:
        return False


def _counts_of(given: Any, shape: tuple[int, ...]) -> Floats | None:
    """Counts that were saved; None where they are nonsense, or of another shape."""
    try:
        counts = np.array(given, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return counts if counts.shape == shape and np.isfinite(counts).all() and (counts >= 0).all() else None


def _thinned(counts: Floats, most: float) -> Floats:
    """To at most so many observations per layer."""
    total = np.add.reduce(counts, (0, 2))
    return counts * np.minimum(most / np.maximum(total, 1e-9), 1)[None, :, None]
