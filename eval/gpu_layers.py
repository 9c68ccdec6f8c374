"""Layers alone on a device: each way to run them, their kernels, and their attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eval.gpu_clock import Recorded, kernels_of, seconds_of
from selfspec.decoding.engine import Engine
from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.shapes import shape_of
from selfspec.executors.cuda.static_rows import LayersInputs, StaticRows
from selfspec.kernels.suite import REFERENCE, Kernels
from selfspec.model.attention import Reach
from selfspec.model.kv_cache import Span
from selfspec.model.stack import Stack

Run = Callable[[StaticRows, int, int, Tensor], Tensor]  # layers [start, stop) over the rows
VIEWS, FUSED = "views", "fused body"
FEW = 4  # layers that are compiled, since compiling takes seconds a layer


class Layers:
    """Layers of an engine's stack over one token per row, in recordings as the runner makes them.

    Where there is no runner, on a CPU, they run by the reference kernels.

    Raises:
        ValueError: the model has fewer than four layers, or the engine more rows than a recording holds.
    """

    def __init__(self, engine: Engine) -> None:
        self.stack, runner = engine.stack, engine.stack.runner
        storage = None if runner is None else runner.storages.of(engine.cache)
        cache = engine.cache if storage is None else storage.cache
        spans = [Span(row.pages, len(row.content) - 1, 1) for row in engine.rows]
        shape = shape_of(spans, cache.room)
        if shape is None or self.stack.num_layers < 4:
            raise ValueError("layers are measured of models with at least four, in batches that a recording holds")
        size = self.stack.config.get_text_config().hidden_size
        hidden = torch.randn(shape.tokens, size, dtype=self.stack.dtype, device=self.stack.device)
        self.inputs = LayersInputs(shape, cache, hidden)
        self.inputs.fill(spans, hidden[: len(spans)].clone())
        self.kernels = REFERENCE if runner is None else runner.kernels
        self.cache = cache

    def rows(self) -> StaticRows:
        """New rows for one call."""
        return StaticRows(self.cache, self.inputs.layout, self.kernels)

    @torch.inference_mode()
    def measure(self, run: Run, most: int | None = None) -> dict[str, Any]:
        """Seconds and kernels of one layer; kernels that cannot be counted are None, and `why` says the reason.

        They are differences between two ranges of layers, so that nothing counts that comes once a call.

        Args:
            most: layers to run at most; None: all but the first and the last.
        """
        seconds, kernels, why = list[float](), list[int](), None
        more = min(most or self.stack.num_layers, self.stack.num_layers - 2)
        fewer = more // 2
        for count in (fewer, more):
            body = partial(self._run, run, 1, 1 + count)  # without the embedding and the final norm
            recorded = Recorded(body, self.stack.device)
            seconds.append(seconds_of(recorded.replay, self.stack.device))
            try:
                kernels.append(_count(recorded, self.stack.device))
            except torch.AcceleratorError:
                raise
            except Exception as problem:  # profilers and bindings raise exceptions of any type
                why = str(problem)
        each = (kernels[1] - kernels[0]) / (more - fewer) if len(kernels) == 2 else None
        return {"seconds": (seconds[1] - seconds[0]) / (more - fewer), "kernels": each, "why": why}

    def _run(self, run: Run, start: int, stop: int) -> Tensor:
        return run(self.rows(), start, stop, self.inputs.given)

    @torch.inference_mode()
    def attention_seconds(self) -> float:
        """Seconds of one layer's attention; all layers are read in turn, so that caches hold no keys."""
        config, count = self.stack.config.get_text_config(), self.inputs.shape.tokens
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        options: dict[str, Any] = {"dtype": self.stack.dtype, "device": self.stack.device}
        queries = torch.randn(count, config.num_attention_heads, size, **options).transpose(0, 1)
        new, rows = torch.randn(count, config.num_key_value_heads, size, **options), self.rows()
        pages = [rows.write(layer, new, new) for layer in range(self.stack.num_layers)]

        def body() -> list[Tensor]:
            return [rows.attend(None, queries, keys, values, Reach(None, None), size**-0.5) for keys, values in pages]

        replay = Recorded(body, self.stack.device).replay
        return seconds_of(replay, self.stack.device) / self.stack.num_layers


def _count(recorded: Recorded, device: torch.device) -> int:
    try:
        return kernels_of(recorded.replay, device).count
    except ValueError:
        return recorded.num_nodes


def measure_bodies(engine: Engine) -> dict[str, Any]:
    """Seconds and kernels a layer of the views and of the fused body, as recorded.

    Returns:
        `bodies`, by name; seconds are None where there is no such body, and `why` says the reason. `chosen`: the name
        of the one that was chosen when the model was loaded.
    """
    layers, found = Layers(engine), dict[str, Any]()
    with views(engine.stack) as run:
        found[VIEWS] = layers.measure(run)
    try:
        with fused_body(engine.stack, layers.kernels) as run:
            found[FUSED] = layers.measure(run)
    except (ValueError, torch.OutOfMemoryError) as problem:
        found[FUSED] = {"seconds": None, "kernels": None, "why": str(problem)}
    return {"bodies": found, "chosen": VIEWS if engine.stack.recorded is None else FUSED}


def measure_compiled(engine: Engine) -> dict[str, Any]:
    """Seconds and kernels a layer of the views by `torch.compile`, recorded; of few layers."""
    with compiled_views(engine.stack) as run:
        return Layers(engine).measure(run, FEW)


@contextmanager
def views(stack: Stack) -> Iterator[Run]:
    """The views of transformers' modules."""
    with _recorded_by(stack, None):
        yield stack.run_here


@contextmanager
def compiled_views(stack: Stack) -> Iterator[Run]:
    """The views by `torch.compile`; on a CPU without its compiler, which takes a minute."""
    with views(stack) as run:
        try:
            yield torch.compile(run, dynamic=False, backend="inductor" if stack.device.type == "cuda" else "eager")
        finally:
            torch.compiler.reset()


@contextmanager
def fused_body(stack: Stack, kernels: Kernels) -> Iterator[Run]:
    """The fused body: the one that was chosen at load, else one made for this measurement.

    Raises:
        ValueError: it does not serve this model.
    """
    body = stack.recorded
    if body is None:
        if stack.llama is None:
            raise ValueError("it does not serve this model")
        body = FusedBody(stack.llama, kernels, "copy")
    with _recorded_by(stack, body):
        yield stack.run_here


@contextmanager
def _recorded_by(stack: Any, body: Any) -> Iterator[None]:
    """What runs static rows, inside the block; None: the views. A CPU's engine does not read static rows."""
    before = stack.compiled, stack.recorded
    stack.compiled, stack.recorded = None, body
    try:
        yield
    finally:
        stack.compiled, stack.recorded = before
