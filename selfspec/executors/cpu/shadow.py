"""Shadow picks in one compiled call (`kernels/cpu/shadow.cpp`); its twin is torch's in `selfspec.executors.shadow`.

A look of torch's operations takes a millisecond after rounds that left nothing of the interpreter in the caches: as
long as several tokens of a small model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.executors.cpu.body import CompiledBody
from selfspec.executors.penalties import Penalty
from selfspec.kernels import compiled_call as c

MAX_SINGLE_THREAD = 1 << 22  # products up to which one thread looks


def can_compute_shadow(body: CompiledBody) -> bool:
    """Whether the head's weights lie in memory as they are read: who edits them may have put others in their place."""
    size = body.embedding.shape[1]
    shapes = (body.head.weight, (body.packed_head.num_outputs, size)), (body.head.bias, (body.packed_head.num_outputs,))
    return all(
        one is None or (one.shape == shape and one.is_contiguous() and one.dtype == torch.float32)
        for one, shape in shapes
    )


def look(
    body: CompiledBody,
    hidden: Tensor,
    how: bytes,
    positions: Sequence[int],
    target: Tensor,
    judged: Tensor,
    num_likely: int,
    others: Tensor,
    penalty: Penalty | None = None,
) -> tuple[Tensor, Tensor]:
    """Whether each layer would have picked the target's own token, bool `[K, N]`, and how sure it would have been.

    Args:
        hidden: fp32 `[K, N, hidden_size]`, before the final norm.
        how: what `compiled_pick.told` says of each position, one after another.
        positions: `[N]`, the index in its row's content of the token picked there.
        target: fp32 `[N, vocab]`, the target's logits, after penalties.
        judged: int64 `[N]`, its picks.
        num_likely: of its other tokens, the likeliest that are looked at, fewer than there are.
        others: int64, a sample of the vocabulary that stands for all that is not looked at.
        penalty: of the N positions.
    """
    weight, bias, lib = *body.head, c.functions()
    hidden, target, judged = hidden.contiguous(), target.contiguous(), judged.contiguous()
    num_layers, num_positions, size = hidden.shape
    hits = judged.new_empty(num_layers, num_positions, dtype=torch.bool)
    sure = hidden.new_empty(num_layers, num_positions)
    at, told = (ctypes.c_int64 * num_positions)(*positions), ctypes.create_string_buffer(how, len(how))
    marks = () if penalty is None else (penalty.seen.contiguous(), penalty.bias.contiguous())
    looking = c.Looking(
        *(num_layers, num_positions, size, target.shape[1], num_likely, len(others)),
        *(weight.data_ptr(), None if bias is None else bias.data_ptr(), body.last_norm.data_ptr(), others.data_ptr()),
        *(hidden.data_ptr(), target.data_ptr(), judged.data_ptr(), ctypes.addressof(told)),
        *(ctypes.addressof(at), hits.data_ptr(), sure.data_ptr(), body.norm.eps),
        *(one.data_ptr() for one in marks),
    )
    products = hidden.numel() * (1 + num_likely + len(others))
    threads = min(body.threads(num_positions), num_positions) if products > MAX_SINGLE_THREAD else 1
    room = judged.new_empty(threads * lib.selfspec_shadow_words(ctypes.byref(looking)))
    lib.selfspec_shadow(ctypes.byref(looking), room.data_ptr(), threads)
    return hits, sure
