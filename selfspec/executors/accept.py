"""Picks that cannot be made."""

from __future__ import annotations

from collections import abc

from selfspec.core import Sequence


def num_pickable(sequence: Sequence, num_accepted: int, can_pick: abc.Sequence[int]) -> int:
    """The accepted tokens after which a token can be picked; the sequence may end before the position where none can.

    Args:
        can_pick: per position, 0 where one logit is NaN, as where processors failed, or, of a sampled row, all are -inf
            or one is +inf.

    Raises:
        ValueError: none can be sampled at the first position, as `generate` raises then; it is the sequence's own
            fault. A greedy pick there is made of any logits, as in `generate`.
    """
    if can_pick[0] or sequence.request.params.is_greedy:
        return next((i for i in range(num_accepted) if not can_pick[i + 1]), num_accepted)
    with sequence.blame():
        raise ValueError(
            f"no token can be sampled at position {sequence.num_tokens}, where all logits are -inf or one of them is "
            "no number; let logits_processors and no_repeat_ngram_size leave a token"
        )
