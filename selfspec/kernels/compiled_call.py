"""The C structures and functions of `cpu/` in ctypes. The C++ headers describe the fields."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_float, c_int64, c_void_p
from functools import lru_cache
from typing import Any

from selfspec.kernels.compiler import library


def _all(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


FULL, HALF, AMX, PAIRS, INT4, MIXED = range(6)  # formats of packed weights: see `cpu/product.h`
BLOCKS = {name: MIXED + 1 + i for i, name in enumerate(("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K"))}
"""The formats of blocks, by their type in GGUF files."""
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}  # of the MLP: `Activation` in `cpu/model.h`


class Product(Structure):
    """A matrix product with packed weights: `cpu/model.h`."""

    _fields_ = (*_all("packed bias", c_void_p), *_all("inputs outputs kind", c_int64), *_all("panels", c_void_p))


class RowTable(Structure):
    """A matrix of which single rows are read: `cpu/model.h`."""

    _fields_ = (("floats", c_void_p), ("packed", ctypes.POINTER(Product)))


class Layer(Structure):
    """A layer's products, norms and KV pages: `cpu/model.h`."""

    _fields_ = (
        *_all("qkv o gate_up down", Product),
        *_all("norm mlp_norm q_norm k_norm post_norm post_mlp_norm keys values", c_void_p),
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
        *_all("min_confidence least", c_double),
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
        *_all("exit_head", c_void_p),
        *_all("stop", Stop),
        *_all("counts tokens confidences hidden taken noise", c_void_p),
        *_all("num_kept", c_int64),
        *_all("histories places", c_void_p),
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
        *_all("counts tokens num_emitted picks taps logits taken num_likely", c_void_p),
        *_all("most_likely", c_int64),
        *_all("logprobs ranks likely likely_logprobs", c_void_p),
    )


class Program(Structure):
    """Inputs and outputs of a program of rounds: `cpu/program.cpp`."""

    _fields_ = (
        *_all("rounds", c_int64),
        *_all("seconds", c_double),
        *_all("capacities ends stops indices others sources", c_void_p),
        *_all("num_others", c_int64),
        *_all("lengths gains needs", c_void_p),
        *_all("num_needs", c_int64),
        *_all("given matches drafted_from texts text_ends num_prompts", c_void_p),
        *_all("done", c_int64),
    )


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
        "selfspec_exit_head": ([p, p, n, p, p, n], None),
        "selfspec_fits_half": ([p, n], n),
        "selfspec_checksums": ([p, p, n, p, n], None),
        "selfspec_row": ([p, n, n, p], p),
        "selfspec_pack": ([p, n, p, n, n, n, n], None),
        "selfspec_pack_blocks": ([p, n, p, n, p, n, n, n, n], None),
        "selfspec_program": ([p, p, p, p], n),
        "selfspec_index_new": ([n, n], p),
        "selfspec_index_bytes": ([p], n),
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
