"""What a tracker may start from: the counts and curves that `Tracker.state` of an earlier one told."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.control.plan import CONFIDENCE_EDGES, NUM_BINS

MOST_CURVE = 50.0  # offset or slope: what is farther from 0 is no curve


def read_prior(given: Any, num_layers: int) -> NDArray[np.float64]:
    """Counts `[2, L - 1, NUM_BINS]` from `Tracker.state`.

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
    return counts


def read_curve(given: Any, num_layers: int) -> NDArray[np.float64] | None:
    """The curves `[2, L - 1]` that are fitted to the counts, about; None where they are not told, or nonsense."""
    try:
        curve = np.array(given["curve"], np.float64, order="C")
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return curve if curve.shape == (2, num_layers - 1) and (np.abs(curve) < MOST_CURVE).all() else None


def thinned(counts: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """To at most so many observations per layer."""
    total = np.add.reduce(counts, (0, 2))
    return counts * (np.minimum(total, most) / np.maximum(total, 1e-9))[None, :, None]


def is_prior(given: Any, num_layers: int) -> bool:
    """Whether a tracker of a model of this depth can start from it."""
    try:
        read_prior(given, num_layers)
        return True
    except ValueError:
        return False
