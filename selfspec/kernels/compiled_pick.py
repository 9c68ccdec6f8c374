"""The compiled pick from logits on CPU (`cpu/pick.h`). `selfspec.executors.pick` does the same in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.kernels import compiled_call as c

MAX_SINGLE_THREAD = 1 << 16  # logits up to which one thread is faster than several


class Picks(NamedTuple):
    """The tokens picked at N positions."""

    tokens: Tensor  # int64 [N]
    confidences: Tensor | None = None  # fp32 [N], of the tokens; None: not requested


def sampling_bytes(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    ngram: int = 0,
) -> bytes:
    """The bytes of a `SamplingParams` structure: a row's sampling parameters for compiled functions.

    `compiled_pick` ignores the penalties in it: it takes logits to which they are applied already.
    """
    return bytes(c.SamplingParams(temperature, top_p, min_p, repetition, presence, frequency, top_k, seed, ngram))


def compiled_pick(
    logits: Tensor,
    params: bytes,
    positions: Sequence[int],
    tokens: Tensor | None = None,
    with_confidence: bool = False,
) -> Picks:
    """Pick one token per row of logits on CPU. A row's pick does not depend on the other rows.

    Args:
        logits: fp32 `[N, T]`.
        params: `sampling_bytes` of each row, joined.
        positions: `[N]`, the index in its row's content of the token to be picked.
        tokens: int64 `[T]` or `[N, T]`, ascending: the token ids of the logits; None: the whole vocabulary.
        with_confidence: compute confidences.

    Raises:
        NoCompilerError: see `selfspec.kernels.compiler.library`.
    """
    lib, (count, size) = c.functions(), logits.shape
    logits = logits if logits.dtype == torch.float32 and logits.stride(1) == 1 else logits.float().contiguous()
    picks = logits.new_empty(count, dtype=torch.int64)
    confidences = logits.new_empty(count) if with_confidence else None
    threads = min(torch.get_num_threads(), count) if count * size > MAX_SINGLE_THREAD else 1
    memory = logits.new_empty(threads * lib.selfspec_pick_floats(size))
    names, stride = (None, 0) if tokens is None else (tokens.data_ptr(), tokens.stride(0) if tokens.dim() > 1 else 0)
    at = (ctypes.c_int64 * count)(*positions)
    lib.selfspec_pick(
        *(logits.data_ptr(), logits.stride(0), count, size, params, at, names, stride),
        *(picks.data_ptr(), None if confidences is None else confidences.data_ptr()),
        *(memory.data_ptr(), threads),
    )
    return Picks(picks, confidences)
