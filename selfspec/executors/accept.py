"""Picks that sampling cannot make."""

from __future__ import annotations

from collections import abc

from selfspec.core import Sequence


def num_sampleable(sequence: Sequence, num_accepted: int, can_sample: abc.Sequence[int]) -> int:
    """The accepted tokens after which a token can be sampled; the sequence may end before the position where none can.

    Args:
        can_sample: per position, 0 where all logits are -inf or one is NaN.

    Raises:
        ValueError: not even at the first position, as `generate` raises then; it is the sequence's own fault.
    """
    if can_sample[0]:
        return next((i for i in range(num_accepted) if not can_sample[i + 1]), num_accepted)
    with sequence.blame():
        raise ValueError(
            f"no token can be sampled at position {sequence.num_tokens}, where all logits are -inf or one of them is "
            "no number; let logits_processors and no_repeat_ngram_size leave a token"
        )
