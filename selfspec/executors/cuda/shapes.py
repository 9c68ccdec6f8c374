"""How far a call's shape is rounded up, so that few recordings serve every call.

A bucket of tokens alone would not do: how many rows there may be, how many new tokens one of them may have, and how
many it may hold shape a recording too, each on its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from selfspec.model.attention_backends import fits_masks
from selfspec.model.kv_cache import Span

TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SLOTS = (1, 2, 4, 8, 16, 32, 64, 128)
NEW = (1, 2, 4, 8, 16)
LEAST_HELD = 2048  # tokens; beyond, powers of two. Programs for tokens that no row holds end at once


class Shape(NamedTuple):
    """The capacities of a recording."""

    tokens: int  # packed tokens, padding included
    slots: int  # rows
    most_new: int  # new tokens of any row
    most_tokens: int  # tokens that any row holds, the new ones included
    trees: bool = False  # whether rows may be trees


def round_up(value: int, steps: Sequence[int]) -> int | None:
    """The least step that is no less; None beyond the last."""
    at = bisect_left(steps, value)
    return steps[at] if at < len(steps) else None


def token_capacity(most_tokens: int, room: int) -> int:
    """The capacity for rows of at most so many tokens, in a cache with room for so many in all."""
    return min(room, max(LEAST_HELD, 1 << (most_tokens - 1).bit_length()))


def shape_of(spans: Sequence[Span], room: int) -> Shape | None:
    """The least shape that a packed call fits into; None for calls that are not recorded, such as prompts.

    Args:
        room: tokens that the cache holds in all.
    """
    tokens = round_up(sum(span.length for span in spans), TOKENS)
    slots = round_up(len(spans), SLOTS)
    most_new = round_up(max(span.length for span in spans), NEW)
    if tokens is None or slots is None or most_new is None or not fits_masks(spans):
        return None
    most_tokens = token_capacity(max(span.start + span.length for span in spans), room)
    return Shape(tokens, slots, most_new, most_tokens, any(span.tree is not None for span in spans))
