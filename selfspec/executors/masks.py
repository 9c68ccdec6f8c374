"""Masks of structured outputs, at every position with its own prefix; they come after processors, before filters."""

from __future__ import annotations

from collections import abc

import numpy as np
import torch
from torch import Tensor

from selfspec.core import Sequence
from selfspec.executors.penalties import Penalty
from selfspec.structured.row_grammar import Mask


def mask_of(row: Sequence, drafted: abc.Sequence[int]) -> Mask | None:
    """A row's mask after its content and the `drafted` tokens; None: all tokens are allowed.

    Raises:
        GrammarError: the grammar cannot be followed; it is the row's own fault.
    """
    if row.grammar is None:
        return None
    with row.blame():
        return row.grammar.mask(drafted).copy()  # further positions are asked for


def masked(logits: Tensor, masks: abc.Sequence[Mask | None]) -> Tensor:
    """Logits, a new tensor, in which tokens that are not allowed have -inf.

    Args:
        logits: `[N, vocab]`.
        masks: of the N positions.
    """
    some = [i for i, mask in enumerate(masks) if mask is not None]
    if not some:
        return logits
    out = logits.clone()
    out[some] = logits[some].masked_fill(~_allowed(masks, logits), float("-inf"))
    return out


def penalty_of(masks: abc.Sequence[Mask | None], like: Tensor, penalty: Penalty | None) -> Penalty | None:
    """Masks of N positions as a part of their penalties, for logits of some tokens alone.

    Args:
        like: fp32 `[N, vocab]`, whose device counts.
        penalty: of the same positions; None: there is none.
    """
    some = [i for i, mask in enumerate(masks) if mask is not None]
    if not some:
        return penalty
    if penalty is None:
        nothing = torch.zeros_like(like)
        penalty = Penalty(torch.ones_like(like[:, :1]), nothing.bool(), nothing)
    bias = penalty.bias.clone()
    bias[some] = bias[some].masked_fill(~_allowed(masks, like), float("-inf"))
    return penalty._replace(bias=bias)


def _allowed(masks: abc.Sequence[Mask | None], like: Tensor) -> Tensor:
    """The masks that there are as bool `[*, vocab]`."""
    bits = np.stack([mask for mask in masks if mask is not None]).astype("<u4", copy=False).view(np.uint8)
    allowed = torch.from_numpy(np.unpackbits(bits, axis=1, bitorder="little")).bool()
    return allowed[:, : like.shape[1]].to(like.device)
