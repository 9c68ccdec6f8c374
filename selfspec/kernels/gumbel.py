"""Gumbel noise from a counter-based hash: the same for (seed, position, token) on any device, in any batch and order.

The hash is SplitMix64 (Steele, Lea, Flood 2014) used as a random-access stream; the noise makes argmax a sampler
(Gumbel-max), so that draft and target can pick with the same randomness.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

# 64-bit constants written as the signed integers torch computes with; products wrap.
_STEP, _MUL1, _MUL2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, a new tensor."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = _shift(z, 30).bitwise_xor_(z).mul_(_MUL1)
    z = _shift(z, 27).bitwise_xor_(z).mul_(_MUL2)
    return _shift(z, 31).bitwise_xor_(z)


@lru_cache(maxsize=8)
def _steps(vocab_size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it may be used where gradients are recorded, too
        return (torch.arange(vocab_size, device=device) + 1) * _STEP


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int, tokens: Tensor | None = None) -> Tensor:
    """Standard Gumbel noise `[N, vocab_size]`, fp32, for the tokens to be picked at `positions` of rows with `seeds`.

    Args:
        seeds: int64 `[N]`.
        positions: int64 `[N]`, the index in its row's content of the token to be picked.
        tokens: int64 `[N, T]`: only the noise of these, `[N, T]`.
    """
    keys = _mix(_mix(seeds * _STEP + _STEP) + positions * _STEP)
    steps = _steps(vocab_size, seeds.device) if tokens is None else (tokens + 1) * _STEP
    bits = _shift(_mix(keys[:, None] + steps), 12)
    # 52 bits: plus one half is exact in float64 and never 0 or 1
    uniform = bits.double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_().float()


class NoiseAhead:
    """The noise of `gumbel`, made ahead in blocks of positions and kept, where that is cheap.

    A draft, its verification and the next draft after a rejection pick at the same positions; and making a few
    positions' noise together takes little longer than making one's. Off the CPU, and where many rows or a large
    vocabulary need more than may be kept, noise is made anew each time.

    Args:
        most: bytes that are kept.
    """

    BLOCK = 8  # positions

    def __init__(self, most: int = 32 << 20) -> None:
        self.most = most
        self._kept: OrderedDict[tuple[int, int, int], Tensor] = OrderedDict()  # (seed, block, vocabulary), latest last
        self._bytes = 0

    def __call__(self, seeds: Sequence[int], positions: Tensor, vocab_size: int) -> Tensor:
        """Noise `[N, vocab_size]`, fp32, for int64 `[N]` positions of rows with these N seeds; not to be changed."""
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
        """(seed, block) -> its noise `[BLOCK, vocab_size]`."""
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
                found[one] = noise.clone() if len(missing) > 1 else noise  # a view would keep all of them
                self._keep((*one, vocab_size), found[one])
        return found

    def _keep(self, key: tuple[int, int, int], noise: Tensor) -> None:
        self._kept[key] = noise
        self._bytes += noise.nbytes
        while self._bytes > self.most:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
