"""Shapes of recordings. The shape of a call is rounded up to one of few shapes, so that few recordings serve all calls.

Packed tokens, rows, new tokens per row and tokens held per row are rounded up separately: each of them determines sizes
in a recording.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from selfspec.model.kv_cache import Span

TOKENS = SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NEW = (1, 2, 4, 8, 16)
LEAST_HELD, HELD_FACTOR = 4096, 4  # smallest capacity per row in tokens; each larger one over the one before


class Shape(NamedTuple):
    """The capacities of a recording."""

    tokens: int  # packed tokens, padding included
    slots: int  # rows
    most_new: int  # maximum new tokens per row
    most_tokens: int  # maximum tokens held per row, new ones included


def round_up(value: int, steps: Sequence[int]) -> int | None:
    """The smallest of the ascending `steps` that is at least `value`; None if there is none."""
    at = bisect_left(steps, value)
    return steps[at] if at < len(steps) else None


def token_capacity(most_tokens: int, limit: int) -> int:
    """The capacity per row in tokens, for rows of at most `most_tokens` in a cache that holds `limit` tokens in all."""
    capacity = LEAST_HELD
    while capacity < most_tokens:
        capacity *= HELD_FACTOR
    return min(limit, capacity)


def shape_of(spans: Sequence[Span], limit: int) -> Shape | None:
    """The smallest shape for a packed call; None for calls that are not recorded, such as prompts and trees.

    Args:
        spans: the rows of the call.
        limit: the capacity of the cache in tokens.
    """
    tokens = round_up(sum(span.length for span in spans), TOKENS)
    slots = round_up(len(spans), SLOTS)
    most_new = round_up(max(span.length for span in spans), NEW)
    if tokens is None or slots is None or most_new is None or any(span.tree is not None for span in spans):
        return None
    most_tokens = token_capacity(max(span.start + span.length for span in spans), limit)
    return Shape(tokens, slots, most_new, most_tokens)
