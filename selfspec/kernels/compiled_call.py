"""The C structures and functions of `cpu/` in ctypes. The C++ headers describe the fields."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_double, c_float, c_int64, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.kernels.compiler import library


def _all(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


FULL, HALF, AMX, PAIRS, INT4, MIXED = range(6)  # formats of packed weights: see `cpu/product.h`
_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
BLOCKS = {name: MIXED + 1 + i for i, name in enumerate(_TYPES)}
"""The formats of blocks, by their type in GGUF files."""
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}  # of the MLP: `Activation` in `cpu/model.h`


class Product(Structure):
    """A matrix product with packed weights: `cpu/model.h`."""

    _fields_ = (
        *_all("packed bias", c_void_p),
        *_all("inputs outputs kind", c_int64),
        ("panels", c_void_p),
        ("digits", c_int64),
    )


class RowTable(Structure):
    """A matrix of which single rows are read: `cpu/model.h`."""

    _fields_ = (("floats", c_void_p), ("packed", ctypes.POINTER(Product)))


class Layer(Structure):
    """A layer's products, norms and KV pages: `cpu/model.h`."""

    _fields_ = (
        *_all("qkv o gate_up down", Product),
        *_all("norm mlp_norm q_norm k_norm post_norm post_mlp_norm", c_void_p),
        *_all("keys values key_scales value_scales", c_void_p),
        *_all("window table", c_int64),
    )


class ExitHead(Structure):
    """A trained head of an exit layer: `cpu/model.h`."""

    _fields_ = (*_all("gate_up down", Product), *_all("norm", c_void_p), *_all("eps", c_float))


class Model(Structure):
    """A model's sizes and constants: `cpu/model.h`."""

    _fields_ = (
        *_all("heads kv_heads head_dim page_size hidden inner tables activation", c_int64),
        *_all("eps mlp_eps qk_eps scale embed_scale", c_float),
    )


class Call(Structure):
    """The rows of a packed call: `cpu/model.h`."""

    _fields_ = (
        *_all("num_tokens num_rows", c_int64),
        *_all("positions firsts pages", c_void_p),
        *_all("row_pages", c_int64),
        *_all("cos sin", c_void_p),
    )


class SamplingParams(Structure):
    """How a row picks tokens: `cpu/model.h`."""

    _fields_ = (
        *_all("temperature top_p min_p repetition presence frequency", c_float),
        *_all("top_k seed ngram", c_int64),
    )


class Stop(Structure):
    """When rows stop drafting: `cpu/drafting.h`."""

    _fields_ = (
        *_all("min_confidence least keep", c_double),
        *_all("edges calibration", c_void_p),
        *_all("num_edges", c_int64),
    )


class DraftArgs(Structure):
    """Inputs and outputs of a draft: `cpu/drafting.h`."""

    _fields_ = (
        *_all("num_rows most vocab", c_int64),
        *_all("pages positions lengths last", c_void_p),
        *_all("row_pages", c_int64),
        *_all("params names cos sin embedding norm", c_void_p),
        *_all("eps", c_float),
        *_all("exit_head finals", c_void_p),
        *_all("stop", Stop),
        *_all("counts tokens confidences hidden taken noise", c_void_p),
        *_all("num_kept", c_int64),
        *_all("histories places grammars num_verified", c_void_p),
    )


class VerifyArgs(Structure):
    """Inputs and outputs of a verification: `cpu/round.h`."""

    _fields_ = (
        *_all("layers", c_void_p),
        *_all("num_layers", c_int64),
        *_all("head norm drafters", c_void_p),
        *_all("exit_layer", c_int64),
        *_all("draft_head", c_void_p),
        *_all("are_copies longest few threads_few threads", c_int64),
        *_all("most", c_int64),
        *_all("counts tokens num_emitted picks taps finals logits taken num_likely", c_void_p),
        *_all("most_likely", c_int64),
        *_all("logprobs ranks likely likely_logprobs", c_void_p),
    )


class Program(Structure):
    """Inputs and outputs of a program of rounds: `cpu/program.cpp`."""

    _fields_ = (
        *_all("rounds", c_int64),
        *_all("seconds balance share most_balance overrun plain_seconds layers_price", c_double),
        *_all("prices leads", c_void_p),
        *_all("num_prices has_waiting has_overrun", c_int64),
        *_all("capacities ends stops indices others sources", c_void_p),
        *_all("num_others", c_int64),
        *_all("lengths gains needs", c_void_p),
        *_all("num_needs", c_int64),
        *_all("given matches drafted_from texts text_ends num_prompts", c_void_p),
        *_all("bias_ends bias_tokens bias_until bias follow has_grammar most_forced", c_void_p),
        *_all("done", c_int64),
    )


FOLLOW = ctypes.CFUNCTYPE(c_int64, c_int64, c_int64, c_int64)
"""Follows the grammars of a program's rows: `Follow` in `cpu/grammars.h`."""


class Found(Structure):
    """An occurrence of a context's last tokens: `cpu/lookup.h`."""

    _fields_ = (*_all("match place", c_int64),)


class ProbeArgs(Structure):
    """Inputs and outputs of shadow picks: `cpu/shadow.cpp`."""

    _fields_ = (
        *_all("num_layers num_positions hidden vocab num_likely num_others", c_int64),
        *_all("head bias norm others states target judged params positions hits confidences", c_void_p),
        *_all("eps", c_float),
        *_all("seen penalty_bias", c_void_p),
    )


@lru_cache(maxsize=1)
def functions() -> ctypes.CDLL:
    """The compiled library, with the types of its functions. It is compiled and loaded at the first call.

    Raises:
        NoCompilerError: see `selfspec.kernels.compiler.library`.
    """
    lib, p, n = library(), c_void_p, c_int64
    types = {
        "selfspec_panel": ([], n),
        "selfspec_smallest": ([n], n),
        "selfspec_panel_bytes": ([n, n], n),
        "selfspec_buffer_floats": ([p, n], n),
        "selfspec_scratch_floats": ([p, n], n),
        "selfspec_linear_floats": ([p, n, n], n),
        "selfspec_run": ([p, p, n, p, p, p, p, p, p, p, p, n, n], None),
        "selfspec_linear": ([p, p, n, p, p, c_float, p, n], None),
        "selfspec_exit_head_floats": ([p, n, n], n),
        "selfspec_exit_head": ([p, p, p, n, p, p, n], None),
        "selfspec_fits_half": ([p, n], n),
        "selfspec_checksums": ([p, p, n, p, n], None),
        "selfspec_row": ([p, n, n, p], p),
        "selfspec_pack": ([p, n, p, n, n, n, n], None),
        "selfspec_pack_blocks": ([p, n, p, n, p, n, n, n, n], None),
        "selfspec_program": ([p, p, p, p], n),
        "selfspec_index_new": ([n, n], p),
        "selfspec_index_add": ([p, p, n], ctypes.c_bool),
        "selfspec_index_add_text": ([p, p, n, n], ctypes.c_bool),
        "selfspec_index_state": ([p, p], n),
        "selfspec_index_counts": ([p, p], None),
        "selfspec_corpus_new": ([p, p, p, p], p),
        "selfspec_texts_find": ([p, p, n, p], None),
        "selfspec_texts_draft": ([p, p, n, p], n),
        "selfspec_texts_free": ([p], None),
        "selfspec_pick_floats": ([n], n),
        "selfspec_shadow_words": ([p], n),
        "selfspec_shadow": ([p, p, n], None),
        "selfspec_pick": ([p, n, n, n, p, p, p, n, p, p, p, n], None),
    }
    for name, (arguments, result) in types.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, result
    return lib


def loaded() -> ctypes.CDLL | None:
    """The compiled library if it is loaded already, else None. For callers that do without it rather than compile."""
    return functions() if functions.cache_info().currsize else None


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
    return bytes(SamplingParams(temperature, top_p, min_p, repetition, presence, frequency, top_k, seed, ngram))


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
    lib, (count, size) = functions(), logits.shape
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
