"""Gumbel noise from a counter-based hash of (seed, position, token): equal on all devices, in any batch and order.

The hash is SplitMix64 (Steele, Lea, Flood 2014) as a random-access stream. With this noise, argmax samples (Gumbel-max
trick), so that draft and target pick with the same randomness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

# 64-bit constants as signed integers, since torch has no unsigned arithmetic; products wrap around.
_STEP, _MUL1, _MUL2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(z: Tensor, bits: int) -> Tensor:
    """The logical right shift of int64, as a new tensor."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = _shift(z, 30).bitwise_xor_(z).mul_(_MUL1)
    z = _shift(z, 27).bitwise_xor_(z).mul_(_MUL2)
    return _shift(z, 31).bitwise_xor_(z)


@lru_cache(maxsize=8)
def _steps(vocab_size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # also used where gradients are recorded
        return (torch.arange(vocab_size, device=device) + 1) * _STEP


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int, tokens: Tensor | None = None) -> Tensor:
    """Standard Gumbel noise, fp32 `[N, vocab_size]`, for picks at N positions.

    Args:
        seeds: int64 `[N]`, the seed of each position's row.
        positions: int64 `[N]`, the index in its row's content of the token to be picked.
        tokens: int64 `[N, T]`: return the noise of these tokens only, `[N, T]`.
    """
    keys = _mix(_mix(seeds * _STEP + _STEP) + positions * _STEP)
    steps = _steps(vocab_size, seeds.device) if tokens is None else (tokens + 1) * _STEP
    bits = _shift(_mix(keys[:, None] + steps), 12)
    # Adding one half to 52 bits is exact in float64, and the result is never 0 or 1.
    uniform = bits.double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_().float()


class NoiseAhead:
    """The noise of `gumbel`, computed in blocks of positions and cached.

    A draft, its verification and the next draft after a rejection pick at the same positions, and the noise of a few
    positions takes little longer to compute than that of one. Noise is not cached on other devices than the CPU, or if
    the rows of a call need more than `most` bytes.

    Args:
        most: maximum bytes of cached noise.
    """

    BLOCK = 8  # positions

    def __init__(self, most: int = 32 << 20) -> None:
        self.most = most
        self._kept: OrderedDict[tuple[int, int, int], Tensor] = OrderedDict()  # (seed, block, vocabulary), latest last
        self._bytes = 0

    def __call__(self, seeds: Sequence[int], positions: Tensor, vocab_size: int) -> Tensor:
        """Noise, fp32 `[N, vocab_size]`, for int64 `[N]` positions of rows with these N seeds. Do not modify it."""
        two_blocks_each = 2 * len(set(seeds)) * 4 * self.BLOCK * vocab_size
        if positions.device.type != "cpu" or two_blocks_each > self.most:
            return gumbel(torch.tensor(seeds, device=positions.device), positions, vocab_size)
        at = [(seed, *divmod(position, self.BLOCK)) for seed, position in zip(seeds, positions.tolist(), strict=True)]
        blocks = self._blocks(list(dict.fromkeys((seed, block) for seed, block, _ in at)), vocab_size)
        seed, block, first = at[0]
        if at == [(seed, block, first + i) for i in range(len(at))]:
            return blocks[seed, block][first : first + len(at)]
        return torch.stack([blocks[seed, block][inside] for seed, block, inside in at])

    def _blocks(self, wanted: Sequence[tuple[int, int]], vocab_size: int) -> dict[tuple[int, int], Tensor]:
        """The noise of each (seed, block), fp32 `[BLOCK, vocab_size]`."""
        found, missing = dict[tuple[int, int], Tensor](), []
        for one in wanted:
            kept = self._kept.get((*one, vocab_size))
            if kept is None:
                missing.append(one)
            else:
                self._kept.move_to_end((*one, vocab_size))
                found[one] = kept
        if missing:
            starts = torch.tensor([block * self.BLOCK for _, block in missing])
            positions = (starts[:, None] + torch.arange(self.BLOCK)).flatten()
            seeds = torch.tensor([seed for seed, _ in missing]).repeat_interleave(self.BLOCK)
            made = gumbel(seeds, positions, vocab_size).split(self.BLOCK)
            for one, noise in zip(missing, made, strict=True):
                found[one] = noise.clone() if len(missing) > 1 else noise  # a view would keep the memory of all
                self._keep((*one, vocab_size), found[one])
        return found

    def _keep(self, key: tuple[int, int, int], noise: Tensor) -> None:
        self._kept[key] = noise
        self._bytes += noise.nbytes
        while self._bytes > self.most:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
