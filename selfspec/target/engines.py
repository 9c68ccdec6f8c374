"""Which code runs a model's layers: the views of its own modules, a fused body, or that body compiled here.

The views serve every family and are the reference; the others serve what they are known to, and only after the
self-check has found them equal to the whole model.
"""

from __future__ import annotations

import logging
import os
from time import perf_counter
from typing import Literal

import torch

from selfspec.errors import NoCompilerError
from selfspec.target.cache import PackedRows, PagedCache, Span
from selfspec.target.compiled import CompiledBody
from selfspec.target.lean import LeanBody
from selfspec.target.selfcheck import self_check
from selfspec.target.stack import Stack

Engine = Literal["auto", "views", "fused", "compiled"]
ENGINES: tuple[Engine, ...] = ("auto", "views", "fused", "compiled")
MOST_MEMORY = 0.5  # of what is free: what `auto` may spend on packed copies of the weights
READINGS = 3  # of a plain token with each engine
_log = logging.getLogger("selfspec")


def check_engine(engine: str) -> Engine:
    """The engine by name, or ValueError."""
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    return engine


def choose(stack: Stack, engine: Engine) -> float:
    """Give the stack the body of an engine, checked; returns the self-check's split error.

    `auto` takes the compiled body where there is a compiler and room for its packed weights, unless the fused one
    proves faster; both where the model is of a shape they serve; the views elsewhere. In bfloat16 there is no fused
    body; the compiled one rounds less than the model's own forward, and unlike the views' its bits do not depend on how
    many tokens share a call.

    Raises:
        UnsupportedModelError: the model cannot be split at all.
        NoCompilerError: engine "compiled", and it cannot be compiled on this machine.
        ValueError: an engine that does not serve this model.
    """
    fused = stack.lean
    alone = stack.ranks is None and engine in ("auto", "compiled")
    lean = LeanBody.of(stack.model, half=True) if fused is None and alone else fused
    if engine == "views" or (engine == "auto" and lean is None):
        stack.lean = None
        return self_check(stack)
    if lean is None:
        dtypes = "float32 or bfloat16 on CPU" if engine == "compiled" else "float32 or float64"
        raise ValueError(_refusal(stack, engine, f"Llama-shaped models in {dtypes} without hooks or adapters"))
    if engine == "fused":
        error = self_check(stack)
        if stack.lean is None:
            raise ValueError(_refusal(stack, engine, "models whose layers it computes as the model itself does"))
        return error
    if engine == "compiled" and not CompiledBody.serves(lean):
        raise ValueError(_refusal(stack, engine, "Llama-shaped models in float32 or bfloat16 on CPU"))
    try:
        if engine == "compiled" or _worth_compiling(lean):
            stack.lean = _with_threads(CompiledBody(stack.twin))
    except NoCompilerError as problem:
        if engine == "compiled":
            raise
        _log.warning(
            "engine %s runs the layers, which is slower than compiled, most of all in small models: that needs a C++ "
            "compiler, and %s; %s",
            stack.engine,
            problem.reason,
            problem.remedy,
        )
    compiled = stack.lean
    error = self_check(stack)
    if engine == "compiled":
        if stack.lean is None:
            raise ValueError(_refusal(stack, engine, "models whose layers it computes as the model itself does"))
        return error
    if fused is None or (stack.lean is not None and compiled is fused):
        return error
    return _faster(stack, fused, error)


def _faster(stack: Stack, fused: LeanBody, error: float) -> float:
    """The compiled body that the stack has, or the fused one where that is faster or the first failed its check."""
    compiled = stack.lean
    if compiled is not None and plain_seconds(compiled) <= plain_seconds(fused):
        return error
    stack.lean = fused
    return self_check(stack)


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


def plain_seconds(body: LeanBody) -> float:
    """Seconds of a token through all layers, the least of a few readings."""
    cache = PagedCache(1, 64)
    taken, token = [], torch.zeros(1, dtype=torch.int64, device=body.embedding.device)
    with torch.inference_mode():
        for at in range(READINGS):
            start = perf_counter()
            body.run(PackedRows(cache, [Span([0], at, 1)], token.device), 0, len(body.layers), token)
            taken.append(perf_counter() - start)
    return min(taken)


def _worth_compiling(body: LeanBody) -> bool:
    """Whether `auto` may: a model it serves, and memory for the copies."""
    if not CompiledBody.serves(body):
        return False
    free, need = free_memory(), CompiledBody.bytes_of(body)
    if free is not None and need > MOST_MEMORY * free:
        _log.warning(
            "engine %s instead of compiled, whose copies of the weights need %.1f GB of the %.1f GB that are free; "
            "engine 'compiled' takes them all the same",
            "fused" if body.embedding.dtype == torch.float32 else "views",
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
