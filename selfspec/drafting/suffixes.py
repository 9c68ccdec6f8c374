"""Sorting the suffixes of a long array of tokens, with numpy alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 20  # slots sorted at a time


def sort_suffixes(cells: NDArray[np.uint16] | NDArray[np.uint32], depth: int) -> NDArray[np.uint32]:
    """The positions of `cells`, sorted by at least `depth` values from each position on.

    Prefix doubling (Manber and Myers) within tied groups (Larsson and Sadakane): the rank of a position is the first
    slot of its group. Positions ranked by h values are ranked by 2h values after sorting each group by the ranks h
    positions later. It takes O(n log n log depth) time and about 20 bytes per value besides `cells`. The array is
    continued by its last value, which must be a separator.

    Args:
        cells: uint16 or uint32 `[n]`, n < 2**32.
        depth: at least 1.
    """
    counts = np.bincount(cells)
    ranks = (np.cumsum(counts) - counts).astype(np.uint32)[cells]
    slots = np.argsort(cells, kind="stable").astype(np.uint32)
    known = 1
    while known < depth:
        start, tied = 0, False
        while start < len(slots):
            end = _chunk_end(slots, ranks, start)
            tied |= _refine(slots, ranks, start, end, known)
            start = end
        if not tied:
            break
        known *= 2
    return slots


def _chunk_end(slots: NDArray[np.uint32], ranks: NDArray[np.uint32], start: int) -> int:
    """The end of the last group that ends within `CHUNK` slots from `start`, or of the first group if it is longer."""
    end = min(start + CHUNK, len(slots))
    if end == len(slots):
        return end
    group = ranks[slots[end]]
    if group > start:
        return int(group)
    while end < len(slots):
        others = ranks[slots[end : end + CHUNK]] != group
        if others.any():
            return end + int(others.argmax())
        end += len(others)
    return end


def _refine(slots: NDArray[np.uint32], ranks: NDArray[np.uint32], start: int, end: int, known: int) -> bool:
    """Sort the tied groups of a chunk in place by the ranks `known` positions later; False where there was none."""
    chunk = slots[start:end]
    groups = ranks[chunk]
    firsts = np.append(groups == np.arange(start, end, dtype=np.uint32), True)
    tied = np.flatnonzero(~(firsts[:-1] & firsts[1:]))
    if not len(tied):
        return False
    positions = chunk[tied]
    further = np.minimum(positions.astype(np.int64) + known, len(ranks) - 1)
    keys = groups[tied].astype(np.uint64) << np.uint64(32) | ranks[further]
    order = np.argsort(keys, kind="stable")
    keys, positions = keys[order], positions[order]
    chunk[tied] = positions
    firsts = np.append(True, keys[1:] != keys[:-1])
    ranks[positions] = (start + tied[firsts]).astype(np.uint32)[np.cumsum(firsts) - 1]
    return True
