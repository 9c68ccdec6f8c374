"""Shadow picks in one compiled call (`kernels/cpu/shadow.cpp`). `selfspec.executors.shadow` does the same in torch.

After a round, whose weights evict the interpreter's data from the processor's caches, torch's operations take a
millisecond for it: as long as several tokens of a small model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfspec.executors.penalties import Penalty
from selfspec.kernels import compiled_call as c

if TYPE_CHECKING:
    from selfspec.executors.cpu.body import CompiledBody

MAX_SINGLE_THREAD = 1 << 22  # multiplications up to which one thread is used


def shadow_picks(
    body: CompiledBody,
    hidden: Tensor,
    sampling: bytes,
    positions: Sequence[int],
    target: Tensor,
    picks: Tensor,
    num_likely: int,
    others: Tensor,
    penalty: Penalty | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Whether each of K layers would have picked the target's token at N positions, and with which confidence.

    Returns bool `[K, N]` and fp32 `[K, N]`; None where the head's weights are not contiguous float32 of the expected
    shape: the user may have replaced them.

    Args:
        hidden: fp32 `[K, N, hidden_size]`, before the final norm.
        sampling: `compiled_pick.sampling_bytes` of each position, joined.
        positions: `[N]`, the index in its row's content of the token picked there.
        target: fp32 `[N, vocab]`, the target's logits, after penalties.
        picks: int64 `[N]`, the target's picks.
        num_likely: the number of the target's other most probable tokens to compare; less than vocab.
        others: int64 `[M]`, a sample of the vocabulary that represents all other tokens.
        penalty: penalties at the N positions.
    """
    if not _has_expected_head(body):
        return None
    bias, head, lib = body.head.bias, body.head_rows(), c.functions()
    hidden, target, picks = hidden.contiguous(), target.contiguous(), picks.contiguous()
    num_layers, num_positions, size = hidden.shape
    hits = picks.new_empty(num_layers, num_positions, dtype=torch.bool)
    confidences = hidden.new_empty(num_layers, num_positions)
    at = (ctypes.c_int64 * num_positions)(*positions)
    sampling_buffer = ctypes.create_string_buffer(sampling, len(sampling))
    penalties = () if penalty is None else (penalty.seen.contiguous(), penalty.bias.contiguous())
    inputs = c.ProbeArgs(
        *(num_layers, num_positions, size, target.shape[1], num_likely, len(others)),
        *(
            ctypes.addressof(head),
            None if bias is None else bias.data_ptr(),
            body.last_norm.data_ptr(),
            others.data_ptr(),
        ),
        *(hidden.data_ptr(), target.data_ptr(), picks.data_ptr(), ctypes.addressof(sampling_buffer)),
        *(ctypes.addressof(at), hits.data_ptr(), confidences.data_ptr(), body.norm.eps),
        *(one.data_ptr() for one in penalties),
    )
    products = hidden.numel() * (1 + num_likely + len(others))
    threads = min(body.threads(num_positions), num_positions) if products > MAX_SINGLE_THREAD else 1
    memory = picks.new_empty(threads * lib.selfspec_shadow_words(ctypes.byref(inputs)))
    lib.selfspec_shadow(ctypes.byref(inputs), memory.data_ptr(), threads)
    return hits, confidences


def _has_expected_head(body: CompiledBody) -> bool:
    size, count = body.embedding.shape[1], body.packed_head.num_outputs
    parts = (body.head.weight, (count, size)), (body.head.bias, (count,))
    return all(
        one is None or (one.shape == shape and one.is_contiguous() and one.dtype == torch.float32)
        for one, shape in parts
    )
