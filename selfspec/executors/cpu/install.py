"""Which code runs a model's layers: the views of its own modules, or its weights in functions compiled here.

The views serve every family and are the reference. The compiled engine serves Llama-shaped models on CPU, and only
after the self-check has found it equal to the whole model.
"""

from __future__ import annotations

import logging
import os
from time import perf_counter
from typing import Literal

import torch

from selfspec.errors import NoCompilerError
from selfspec.executors.cpu.body import CompiledBody
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.llama_weights import LlamaWeights
from selfspec.model.self_check import self_check
from selfspec.model.stack import Stack

Engine = Literal["auto", "views", "compiled"]
ENGINES: tuple[Engine, ...] = ("auto", "views", "compiled")
MOST_MEMORY = 0.5  # of what is free: what `auto` may spend on packed copies of the weights
READINGS = 3  # of a plain token with each number of threads
_log = logging.getLogger("selfspec")


def check_engine(engine: str) -> Engine:
    """The engine by name, or ValueError."""
    if engine == "fused":
        raise ValueError("engine 'fused' was removed: choose auto, which compiles the models that it served, or views")
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    return engine


def choose(stack: Stack, engine: Engine) -> float:
    """Give the stack the body of an engine, checked; returns the self-check's split error.

    `auto` takes the compiled body where it serves the model, there is a compiler, room for its packed weights, and the
    self-check finds it equal to the model; the views elsewhere. In bfloat16 the compiled body rounds less than the
    model's own forward, and unlike the views' its bits do not depend on how many tokens share a call.

    Raises:
        UnsupportedModelError: the model cannot be split at all.
        NoCompilerError: engine "compiled", and it cannot be compiled on this machine.
        ValueError: an engine that does not serve this model.
    """
    weights, must = stack.llama, engine == "compiled"
    if must and weights is None:
        serves = "Llama-shaped models in float32 or bfloat16 on CPU without hooks or adapters"
        raise ValueError(_refusal(stack, engine, serves))
    if weights is not None and engine != "views":
        try:
            if must or _has_room(weights):
                stack.compiled = _with_threads(CompiledBody(weights))
        except NoCompilerError as problem:
            if must:
                raise
            _log.warning(
                "engine views runs the layers, which is slower than compiled, most of all in small models: that needs "
                "a C++ compiler, and %s; %s",
                problem.reason,
                problem.remedy,
            )
    error = self_check(stack)
    if must and stack.compiled is None:
        raise ValueError(_refusal(stack, engine, "models whose layers it computes as the model itself does"))
    return error


def _with_threads(body: CompiledBody) -> CompiledBody:
    """The body with as many of torch's threads as make a plain token fastest."""
    counts = [1 << i for i in range(torch.get_num_threads().bit_length())]
    if len(counts) > 1:
        taken = {}
        for count in [torch.get_num_threads(), *counts]:
            body.threads_for_few = count
            taken[count] = plain_seconds(body)
        body.threads_for_few = min(taken, key=taken.__getitem__)
    return body


def plain_seconds(body: CompiledBody) -> float:
    """Seconds of a token through all layers, the least of a few readings."""
    cache = PagedCache(1, 64)
    taken, token = [], torch.zeros(1, dtype=torch.int64, device=body.embedding.device)
    with torch.inference_mode():
        for at in range(READINGS):
            start = perf_counter()
            body.run(PackedRows(cache, [Span([0], at, 1)], token.device), 0, len(body.layers), token)
            taken.append(perf_counter() - start)
    return min(taken)


def _has_room(weights: LlamaWeights) -> bool:
    """Whether `auto` may spend the memory that packed copies take."""
    free, need = free_memory(), CompiledBody.bytes_of(weights)
    if free is not None and need > MOST_MEMORY * free:
        _log.warning(
            "engine views instead of compiled, whose copies of the weights need %.1f GB of the %.1f GB that are free; "
            "engine 'compiled' takes them all the same",
            need / 1e9,
            free / 1e9,
        )
        return False
    return True


def free_memory() -> int | None:
    """Bytes that can be had without swapping, where the system tells."""
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


def _refusal(stack: Stack, engine: str, serves: str) -> str:
    kind = getattr(stack.config, "model_type", "model")
    dtype = str(stack.dtype).removeprefix("torch.")
    return f"engine {engine!r} serves {serves}, got {kind} in {dtype} on {stack.device}; choose auto or views"
