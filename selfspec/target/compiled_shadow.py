"""Shadow picks in one compiled call (`kernels/cpu/shadow.cpp`); its twin is torch's in `selfspec.decoding.shadow`.

A look of torch's operations takes a millisecond after rounds that left nothing of the interpreter in the caches: as
long as several tokens of a small model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.kernels import compiled_call as c
from selfspec.target.compiled import CompiledBody

ALONE = 1 << 22  # products up to which one thread looks


def look(
    body: CompiledBody,
    hidden: Tensor,
    how: bytes,
    positions: Sequence[int],
    target: Tensor,
    judged: Tensor,
    num_likely: int,
    others: Tensor,
) -> tuple[Tensor, Tensor]:
    """Whether each layer would have picked the target's own token, bool `[K, N]`, and how sure it would have been.

    Args:
        hidden: fp32 `[K, N, hidden_size]`, before the final norm.
        how: what `compiled_pick.told` says of each position, one after another.
        positions: `[N]`, the index in its row's content of the token picked there.
        target: fp32 `[N, vocab]`, the target's logits.
        judged: int64 `[N]`, its picks.
        num_likely: of its other tokens, the likeliest that are looked at, fewer than there are.
        others: int64, a sample of the vocabulary that stands for all that is not looked at.
    """
    weight, bias = body.head
    hidden, target, judged = hidden.contiguous(), target.contiguous(), judged.contiguous()
    num_layers, num_positions, size = hidden.shape
    hits = torch.empty(num_layers, num_positions, dtype=torch.bool)
    sure = torch.empty(num_layers, num_positions)
    at, told = (ctypes.c_int64 * num_positions)(*positions), ctypes.create_string_buffer(how, len(how))
    looking = c.Looking(
        *(num_layers, num_positions, size, target.shape[1], num_likely, len(others)),
        *(weight.data_ptr(), None if bias is None else bias.data_ptr(), body.last_norm.data_ptr(), others.data_ptr()),
        *(hidden.data_ptr(), target.data_ptr(), judged.data_ptr(), ctypes.addressof(told)),
        *(ctypes.addressof(at), hits.data_ptr(), sure.data_ptr(), body.norm.eps),
    )
    products = hidden.numel() * (1 + num_likely + len(others))
    threads = min(torch.get_num_threads(), num_positions) if products > ALONE else 1
    c.functions().selfspec_shadow(ctypes.byref(looking), threads)
    return hits, sure
