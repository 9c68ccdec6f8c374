"""Weights of quantised blocks, as GGUF files hold them, in torch: fp32, bit-equal to those of the package gguf.

The layouts are those of ggml (docs of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). A block
has 32 weights, or 256 in types whose name ends with K.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def _halves(data: Tensor, first: int) -> Tensor:
    """The float16 number at byte `first` of each block, fp32 `[N, 1]`."""
    return data[:, first : first + 2].contiguous().view(torch.float16).float()


# Of each of eight bytes: the lowest bit, and the lower half.
_BIT, _LOW = 0x0101010101010101, 0x0F0F0F0F0F0F0F0F


def _words(data: Tensor) -> Tensor:
    """Eight bytes as one integer: int64 `[..., n / 8]` of uint8 `[..., n]`."""
    return data.contiguous().view(torch.int64)


def _nibbles(data: Tensor) -> Tensor:
    """Four bits of each byte `[N, parts, n]`: a part's lower ones, then its upper ones; uint8 `[N, parts * 2, n]`."""
    words = _words(data)
    return torch.stack([words & _LOW, words >> 4 & _LOW], 2).view(torch.uint8).flatten(1, 2)


def _fifth_bits(data: Tensor) -> Tensor:
    """The 32 bits of four bytes `[N, 4]`, 16 where set, uint8 `[N, 2, 16]`."""
    return _SPREAD[data.long()].view(torch.uint8).view(-1, 2, 16)


# The bits of each byte, 16 where set, as the eight bytes of an integer.
_SPREAD = (((torch.arange(256)[:, None] >> torch.arange(8)) & 1) << 4).to(torch.uint8).view(torch.int64).flatten()


def _q4_0(data: Tensor) -> Tensor:
    return _nibbles(data[:, None, 2:]).flatten(1).float().sub_(8).mul_(_halves(data, 0))


def _q4_1(data: Tensor) -> Tensor:
    return _nibbles(data[:, None, 4:]).flatten(1).float().mul_(_halves(data, 0)).add_(_halves(data, 2))


def _q5_0(data: Tensor) -> Tensor:
    numbers = _nibbles(data[:, None, 6:]).bitwise_or_(_fifth_bits(data[:, 2:6]))
    return numbers.flatten(1).float().sub_(16).mul_(_halves(data, 0))


def _q5_1(data: Tensor) -> Tensor:
    numbers = _nibbles(data[:, None, 8:]).bitwise_or_(_fifth_bits(data[:, 4:8]))
    return numbers.flatten(1).float().mul_(_halves(data, 0)).add_(_halves(data, 2))


def _q8_0(data: Tensor) -> Tensor:
    return data[:, 2:].view(torch.int8).float().mul_(_halves(data, 0))


def _scales_and_minima(data: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of eight parts, fp32 `[N, 8, 1]`: six bits each, times the block's own."""
    low, middle, high = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    return (_halves(data, 0) * scales)[:, :, None], (_halves(data, 2) * minima)[:, :, None]


def _q4_k(data: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(data)
    return _nibbles(data[:, 16:].reshape(-1, 4, 32)).float().mul_(scales).sub_(minima).flatten(1)


def _q5_k(data: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(data)
    numbers = _nibbles(data[:, 48:].reshape(-1, 4, 32))
    high = _words(data[:, 16:48])
    bits = torch.stack([(high >> part & _BIT) << 4 for part in range(8)], 1).view(torch.uint8)
    return numbers.bitwise_or_(bits).float().mul_(scales).sub_(minima).flatten(1)


def _q6_k(data: Tensor) -> Tensor:
    low, high = _words(data[:, :128].reshape(-1, 2, 64)), _words(data[:, 128:192].reshape(-1, 2, 32))
    four = torch.stack([low & _LOW, low >> 4 & _LOW], 2).view(-1, 2, 4, 4)
    two = torch.stack([(high >> 2 * part & 3 * _BIT) << 4 for part in range(4)], 2)
    scales = data[:, 192:208].view(torch.int8) * _halves(data, 208)
    numbers = four.bitwise_or_(two).view(torch.uint8).view(-1, 16, 16)
    return numbers.float().sub_(32).mul_(scales[:, :, None]).flatten(1)


# Weights and bytes of a block, and how its bytes, uint8 `[N, bytes]`, become weights, fp32 `[N, weights]`.
TYPES: dict[str, tuple[int, int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
}


def block_sizes(kind: str) -> tuple[int, int]:
    """Weights and bytes of a block of any type that the package gguf knows."""
    if kind in TYPES:
        return TYPES[kind][:2]
    import gguf

    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return int(weights), int(size)


def dequantized(data: Tensor, kind: str) -> Tensor:
    """The weights of quantised blocks, fp32 `[rows, in]`.

    Args:
        data: uint8 `[rows, bytes]`, whole blocks one after another.
        kind: the blocks' type, as in GGUF files. Types that `TYPES` lacks are read by the package gguf, slowly.

    Raises:
        KeyError: neither knows the type.
    """
    if kind in TYPES:
        _, size, read = TYPES[kind]
        return read(data.reshape(-1, size)).view(len(data), -1)
    import gguf

    made = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(made, np.float32))
