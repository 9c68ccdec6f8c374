"""Gumbel noise from a counter-based hash: the same for (seed, position, token) on any device, in any batch and order.

The hash is SplitMix64 (Steele, Lea, Flood 2014) used as a random-access stream; the noise makes argmax a sampler
(Gumbel-max), so that draft and target can pick with the same randomness.
"""

from __future__ import annotations

import torch
from torch import Tensor

# 64-bit constants written as the signed integers torch computes with; products wrap.
_STEP, _MUL1, _MUL2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MUL1
    z = (z ^ _shift(z, 27)) * _MUL2
    return z ^ _shift(z, 31)


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int, tokens: Tensor | None = None) -> Tensor:
    """Standard Gumbel noise `[N, vocab_size]`, fp32, for the tokens to be picked at `positions` of rows with `seeds`.

    Args:
        seeds: int64 `[N]`.
        positions: int64 `[N]`, the index in its row's content of the token to be picked.
        tokens: int64 `[N, T]`: only the noise of these, `[N, T]`.
    """
    keys = _mix(_mix(seeds * _STEP + _STEP) + positions * _STEP)
    counters = torch.arange(vocab_size, device=seeds.device) if tokens is None else tokens
    bits = _shift(
        _mix(keys[:, None] + (counters + 1) * _STEP), 12
    )  # 52 bits: plus one half is exact in float64 and never 0 or 1
    uniform = (bits.double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform)).float()
