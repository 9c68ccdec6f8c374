"""The pick from logits, compiled on this machine (`cpu/pick.h`); its twin is torch's in `selfspec.executors.pick`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.kernels import compiled_call as c

MAX_SINGLE_THREAD = 1 << 16  # logits up to which one thread picks: more of them would only wait for each other


class Picks(NamedTuple):
    """What was picked at N positions."""

    tokens: Tensor  # int64 [N]
    sure: Tensor | None  # fp32 [N], how sure each is, where asked
    seconds: Tensor | None  # int64 [N], what would have been picked instead, where asked


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
    """How a row picks, as compiled functions are told. `compiled_pick` takes logits after penalties, whatever these."""
    return bytes(c.How(temperature, top_p, min_p, repetition, presence, frequency, top_k, seed, ngram))


def compiled_pick(
    logits: Tensor,
    how: bytes,
    positions: Sequence[int],
    tokens: Tensor | None = None,
    with_sure: bool = False,
    with_seconds: bool = False,
) -> Picks:
    """Picks from logits on CPU; a row's do not depend on the others.

    Args:
        logits: fp32 `[N, T]`.
        how: what `told` says of each row, one after another.
        positions: `[N]`, the index in its row's content of the token to be picked.
        tokens: int64 `[T]` or `[N, T]`, ascending, those that logits are of; None: all of a vocabulary.

    Raises:
        NoCompilerError: it cannot be compiled here.
    """
    lib, (count, size) = c.functions(), logits.shape
    logits = logits if logits.dtype == torch.float32 and logits.stride(1) == 1 else logits.float().contiguous()
    picks = logits.new_empty(count, dtype=torch.int64)
    seconds = logits.new_empty(count, dtype=torch.int64) if with_seconds else None
    sure = logits.new_empty(count) if with_sure else None
    threads = min(torch.get_num_threads(), count) if count * size > MAX_SINGLE_THREAD else 1
    room = logits.new_empty(threads * lib.selfspec_pick_floats(size))
    names, apart = (None, 0) if tokens is None else (tokens.data_ptr(), tokens.stride(0) if tokens.dim() > 1 else 0)
    lib.selfspec_pick(
        *(logits.data_ptr(), logits.stride(0), count, size, how, (ctypes.c_int64 * count)(*positions), names, apart),
        *(picks.data_ptr(), None if sure is None else sure.data_ptr(), None if seconds is None else seconds.data_ptr()),
        *(room.data_ptr(), threads),
    )
    return Picks(picks, sure, seconds)
