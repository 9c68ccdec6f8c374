"""Two bytes per number: how activations, keys and values of models in quantised blocks are rounded.

A block of `BLOCK` numbers shares a scale, which is a power of two; a number is an integer of `BITS` bits times it. So
sums of products with integer weights are exact, and rounding again changes nothing. Each implementation of such a
model, compiled or not, rounds in this way: it is a part of what the model computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS, BLOCK = 16, 32
ABOVE = 1.004  # keeps the integers below 2^15 / 1.004, so that the upper of two signed bytes is at most 127
EXPONENT = 0x7F800000  # the bits of a float32 number's exponent
LEAST = 1e-30  # blocks of smaller numbers count as zero


def whole(numbers: Tensor, scales: Tensor) -> Tensor:
    """Numbers that are kept in two bytes, in float32: integers `[..., n]` times their scales `[..., blocks]`."""
    size = numbers.shape[-1]
    return numbers.float() * scales.float().repeat_interleave(BLOCK, -1)[..., :size]


def rounded(x: Tensor) -> Tensor:
    """`x` with the last dimension rounded in blocks of `BLOCK` numbers; the last block may be shorter.

    Args:
        x: fp32 `[..., n]`.

    Returns:
        fp32 `[..., n]`. A block with a number that is not finite becomes NaN.
    """
    size = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    power = ((largest * ABOVE).view(torch.int32) & EXPONENT).view(torch.float32)  # of two, at most the number
    scale = power * 2.0 ** (2 - BITS)
    made = torch.round(blocks / scale) * scale
    made = torch.where(largest < LEAST, 0.0, made)
    made = torch.where(largest < torch.inf, made, torch.nan)
    return made.flatten(-2)[..., :size]
