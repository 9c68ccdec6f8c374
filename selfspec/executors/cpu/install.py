"""Choice of the backend that runs a model's layers: "views" (its own modules) or "compiled" (C++ on its weights).

The views serve every model family and are the reference. The compiled backend serves Llama-shaped models on CPU, if the
self-check finds its logits equal to the whole model's.
"""

from __future__ import annotations

import logging
import os
from time import perf_counter
from typing import Literal, NamedTuple

import torch

from selfspec.errors import NoCompilerError
from selfspec.executors.cpu.body import CompiledBody
from selfspec.model import attention_backends as backends
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.llama_weights import LlamaWeights
from selfspec.model.self_check import self_check
from selfspec.model.split_model import SplitModel

Backend = Literal["auto", "views", "compiled"]
BACKENDS: tuple[Backend, ...] = ("auto", "views", "compiled")
MAX_MEMORY_SHARE = 0.5  # share of the free memory that packed copies may take with backend "auto"
REPEATS = 3  # measurements of a plain token per number of threads
_log = logging.getLogger("selfspec")


def check_backend(backend: str) -> Backend:
    """Return the backend.

    Raises:
        ValueError: there is no backend of this name.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend


class Choice(NamedTuple):
    """What runs a model, as the self-check left it."""

    error: float
    """The split error in standard deviations of the logits."""
    is_compiled: bool
    attention: str
    has_short_head: bool
    has_draft_head: bool
    threads_for_few: int | None = None


def choose(split: SplitModel, backend: Backend, known: Choice | None = None) -> Choice:
    """Set the body of a split model, and check it.

    `auto` uses the compiled body if it serves the model, a compiler exists, the packed weights fit into free memory,
    and the self-check passes; else the views. In bfloat16, the compiled body rounds less than the model's own forward.
    Unlike those of the views, its bits do not depend on the number of tokens per call.

    Args:
        known: what was chosen before for the same model on the same machine; it is not checked again.

    Raises:
        UnsupportedModelError: the model cannot be split.
        NoCompilerError: the backend is "compiled", and the code cannot be compiled on this machine.
        ValueError: the backend does not serve this model.
    """
    must = backend == "compiled"
    weights = split.llama if split.llama is not None and CompiledBody.serves(split.llama) else None
    if must and weights is None:
        serves = "Llama-shaped models in float32 or bfloat16 on CPU without hooks or adapters"
        raise ValueError(_refusal(split, backend, serves))
    if weights is not None and backend != "views":
        try:
            if (must or _fits_memory(weights)) and (known is None or known.is_compiled):
                split.compiled = body = CompiledBody(weights)
                if known is None:
                    set_best_threads(body)
                else:
                    body.threads_for_few = known.threads_for_few
        except NoCompilerError as problem:
            if must:
                raise
            _log.warning(
                "backend views runs the layers, which is slower than compiled, especially for small models; backend "
                "compiled needs a C++ compiler, and %s; %s",
                problem.reason,
                problem.remedy,
            )
    if known is not None and known.is_compiled == (split.compiled is not None):
        split.attention = backends.named(known.attention, split.device)
        split.leave_out_heads(short=not known.has_short_head, draft=not known.has_draft_head)
        return known
    error = self_check(split)
    if must and split.compiled is None:
        raise ValueError(_refusal(split, backend, "models whose layers it computes as the model itself does"))
    threads = split.compiled.threads_for_few if isinstance(split.compiled, CompiledBody) else None
    heads = split.has_short_head, split.has_draft_heads
    return Choice(error, split.compiled is not None, split.attention.name, *heads, threads)


def set_best_threads(body: CompiledBody) -> None:
    """Set the number of threads with which a plain token is fastest."""
    counts = [1 << i for i in range(torch.get_num_threads().bit_length())]
    if len(counts) > 1:
        taken = {}
        for count in [torch.get_num_threads(), *counts]:
            body.threads_for_few = count
            taken[count] = plain_seconds(body)
        body.threads_for_few = min(taken, key=taken.__getitem__)


def plain_seconds(body: CompiledBody) -> float:
    """Seconds of one token through all layers: the minimum of a few measurements."""
    cache = PagedCache(1, 64)
    taken, token = [], torch.zeros(1, dtype=torch.int64, device=body.embedding.device)
    with torch.inference_mode():
        for at in range(REPEATS):
            start = perf_counter()
            body.run(PackedRows(cache, [Span([0], at, 1)], token.device), 0, len(body.layers), token)
            taken.append(perf_counter() - start)
    return min(taken)


def _fits_memory(weights: LlamaWeights) -> bool:
    """Whether the packed copies take at most `MAX_MEMORY_SHARE` of the free memory; logs a warning if not."""
    free, need = free_memory(), CompiledBody.bytes_of(weights)
    if free is not None and need > MAX_MEMORY_SHARE * free:
        _log.warning(
            "backend views instead of compiled, whose copies of the weights need %.1f GB of the %.1f GB that are free; "
            "choose backend 'compiled' to use it anyway",
            need / 1e9,
            free / 1e9,
        )
        return False
    return True


def free_memory() -> int | None:
    """Bytes that can be allocated without swapping; None if the system does not report them."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _refusal(split: SplitModel, backend: str, serves: str) -> str:
    kind = getattr(split.config, "model_type", "model")
    dtype = str(split.dtype).removeprefix("torch.")
    return f"backend {backend!r} serves {serves}, got {kind} in {dtype} on {split.device}; choose auto or views"
