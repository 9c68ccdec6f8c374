"""Measure one synthetic target: its cells in order, as far as time and memory allow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from transformers.utils import logging

from eval.gpu_clock import device_speed
from eval.gpu_layers import Layers, measure_bodies, measure_compiled, views
from eval.gpu_peers import folder_rate, peer_rate, read_peer
from eval.gpu_plan import (
    ATTENTION,
    BUSY,
    COMPILED_LAYERS,
    COSTS,
    DRAFT_TOKENS,
    LAYERS,
    PAUSE,
    PEER,
    PREFILL,
    TEMPERATURE,
    TRANSFORMERS,
    Cell,
    GpuConfig,
    cells_of,
)
from eval.gpu_rates import busy_rounds, pauses, prefill_seconds, rate_of, ready_engine
from eval.measurement import device
from eval.synthetic import Synthetic, synthetic_target
from selfspec.decoding.engine import Engine
from selfspec.target import WHOLE_BURST

OPENING = "opening"
COMPILES = {"hf static": 1.0, PEER: 1.0, COMPILED_LAYERS: 0.5}  # expected seconds, by `compile_seconds`
PROGRAMS = 12  # minimum of a measurement
Save = Callable[[dict[str, Any]], None]


def measure_shape(save: Save, name: str, config: GpuConfig, start: float, end: float, found: dict[str, Any]) -> None:
    """Measure a shape in this process; `save` receives the shape's record after every figure.

    Args:
        start, end: the run's start and this shape's planned end, on the clock of `perf_counter`.
        found: the record of an earlier process, or {}; its figures are not tried again.

    Raises:
        LostContextError: the device cannot be used any more; the record's "trying" names the figure.
    """
    logging.set_verbosity_error()
    _Shape(save, name, config, start, end, found).measure()


class _Shape:
    def __init__(
        self, save: Save, name: str, config: GpuConfig, start: float, end: float, found: dict[str, Any]
    ) -> None:
        self.save, self.name, self.config, self.start, self.end = save, name, config, start, end
        self.found = {"cells": [], "tried": [], "not_measured": [], **found}
        self.device = torch.device(config.device)
        self.taken: dict[str, float] = {}  # seconds of the last figure by kind

    def measure(self) -> None:
        self.trying(OPENING)
        begun = perf_counter()
        try:
            if "speed" not in self.found:
                self.found["speed"] = device_speed(self.device)
            # Rows may be longer than the model's training length: speed does not depend on it.
            longest = max(self.config.contexts) + 2 * self.config.new_tokens
            dtype = getattr(torch, self.config.dtype)
            where: dict[str, Any] = {"device": self.device, "max_position_embeddings": longest}
            target = synthetic_target(self.name, dtype=dtype, temperature=TEMPERATURE, **where)
        except Exception as problem:
            check_context(problem, self.device)
            raise
        self.found |= {"target": target.about(), "sizes": sizes_of(target), "engine": target.engine}
        self.found |= {"device": device(self.device), "made_in": perf_counter() - begun}
        for cell in cells_of(self.config):
            if str(cell) not in self.found["tried"]:
                self.cell(target, cell)

    def trying(self, what: str) -> None:
        print(f"[{perf_counter() - self.start:5.0f} s] synthetic {self.name}: {what}", file=sys.stderr, flush=True)
        self.found["trying"] = what
        self.save(self.found)

    def skip(self, what: str, why: str) -> None:
        self.found["not_measured"].append({"what": what, "why": why})
        self.save(self.found)

    def cell(self, target: Synthetic, cell: Cell) -> None:
        """Measure a cell, if there is time and memory. A failure is recorded, except for a lost context."""
        expected, left = self.expected(cell), self.end - perf_counter()
        if left < expected:
            return self.skip(str(cell), f"no time: about {expected:.0f} s needed, {max(0, left):.0f} s left")
        needed, free = needed_bytes(target, cell, self.config.new_tokens_of(cell.batch)), free_bytes(self.device)
        if needed > free:
            return self.skip(str(cell), f"{needed / 2**30:.0f} GiB needed, {free / 2**30:.0f} GiB free")
        self.found["tried"].append(str(cell))
        self.trying(str(cell))
        begun = perf_counter()
        try:
            self.found["cells"].append({**cell._asdict(), **self.measured(target, cell)})
        except Exception as problem:
            check_context(problem, self.device)
            self.skip(str(cell), one_line(problem))
        self.save(self.found)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.taken[cell.kind] = max(perf_counter() - begun, 0.5 * self.taken.get(cell.kind, 0.0))
        return None

    def expected(self, cell: Cell) -> float:
        """Expected seconds of a cell: those of the last one of its kind, or of the longest cell without a compiler."""
        longest = 2 * (self.config.warm_seconds + self.config.window_seconds)
        longest = max(longest, *(seconds for kind, seconds in self.taken.items() if kind not in COMPILES), 0.0)
        return self.taken.get(cell.kind, self.config.compile_seconds * COMPILES.get(cell.kind, 0.0) or longest)

    def measured(self, target: Synthetic, cell: Cell) -> dict[str, Any]:
        """The figures of a cell."""
        config, (context, batch, _) = self.config, cell
        if cell.kind == PREFILL:
            return prefill_seconds(target, context)
        if cell.kind == COSTS:
            return predicted_seconds(target, batch, context)
        if cell.kind == PAUSE:
            return pauses(target, context)
        if cell.kind == PEER:
            peer = next(one for one in map(read_peer, config.peer) if one.name == cell.option)
            left, new_tokens = self.end - perf_counter(), config.new_tokens_of(batch)
            return folder_rate(peer, self.name, batch, context, new_tokens, config.dtype, config.device, left)
        if cell.kind in TRANSFORMERS:
            return peer_rate(target, cell.kind, batch, context, config.window_seconds, DRAFT_TOKENS).as_dict()
        methods = {BUSY: cell.option, **dict.fromkeys((LAYERS, COMPILED_LAYERS, ATTENTION), "plain")}
        method = methods.get(cell.kind, cell.method)
        engine = self.engine(target, cell._replace(method=method))
        if cell.kind == BUSY:
            return busy_rounds(engine)
        if cell.kind == LAYERS:
            return measure_bodies(engine)
        if cell.kind == COMPILED_LAYERS:
            return measure_compiled(engine)
        if cell.kind == ATTENTION:
            with views(target.stack):  # a CPU's engine does not read static rows
                return {"seconds": Layers(engine).attention_seconds()}
        rate = rate_of(engine, config.warm_seconds, config.window_seconds)
        target.remember(engine)  # keeps what the policy has learned, as between calls of the library
        return rate.as_dict()

    def engine(self, target: Synthetic, cell: Cell) -> Engine:
        """An engine with a cell's rows."""
        burst = min(WHOLE_BURST, self.config.window_seconds / PROGRAMS)
        options: dict[str, Any] = {"policy": cell.kind, "burst": burst}
        if cell.kind == "fixed":
            options |= {"exit_layer": target.made.exit_layer, "num_draft_tokens": _draft_tokens(cell)}
        if cell.kind == "plain, exact":
            options |= {"policy": "plain", "exact": True}
        return ready_engine(target, cell.batch, cell.context, self.config.new_tokens_of(cell.batch), **options)


def _draft_tokens(cell: Cell) -> int:
    return int(cell.option) if cell.option else DRAFT_TOKENS


def predicted_seconds(target: Synthetic, batch: int, context: int) -> dict[str, float]:
    """Seconds of rounds of plain and fixed, by the cost table that `adaptive` decides with."""
    costs, exit_layer = target.costs(batch), target.made.exit_layer
    share = (target.stack.default_draft_vocab or target.stack.vocab_size) / target.stack.vocab_size
    fixed = costs.round(exit_layer, (DRAFT_TOKENS,) * batch, context, draft_share=share)
    return {"plain": costs.plain_round(batch, context), "fixed": fixed}


def sizes_of(target: Synthetic) -> dict[str, float]:
    """Bytes of all weights, of those read per token, of the head among these, and of the KV cache per token.

    `draft_head_bytes`: of the head's rows for the default draft vocabulary.
    """
    model, config = target.stack.model, target.stack.config.get_text_config()
    own = sum(p.nbytes for p in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    kv = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * embedding.element_size()
    unread = 0 if head is embedding else embedding.nbytes  # only one row of an embedding is read
    drafts = (target.stack.default_draft_vocab or len(head)) * head[0].nbytes
    read = {"read_bytes": own - unread, "head_bytes": head.nbytes, "draft_head_bytes": drafts}
    return {"weight_bytes": own, **read, "kv_bytes_per_token": kv}


def needed_bytes(target: Synthetic, cell: Cell, new_tokens: int) -> float:
    """Estimated bytes of a cell's KV cache and activations."""
    is_theirs = cell.kind in (*TRANSFORMERS, PREFILL)
    copies = 2.2 if is_theirs else 1.1  # transformers grows its cache by copying
    tokens = cell.batch * (cell.context + new_tokens)
    return copies * tokens * sizes_of(target)["kv_bytes_per_token"] + 2**30 * is_theirs


def free_bytes(device: torch.device) -> float:
    """Free memory of the device, with unused memory reserved by torch; infinite on a CPU."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class LostContextError(RuntimeError):
    """The device cannot be used any more in this process."""


def check_context(problem: Exception, device: torch.device) -> None:
    """Raise LostContextError if, after this error, the device cannot be used any more."""
    lost: Exception | None = problem if isinstance(problem, torch.AcceleratorError) else None
    if lost is None and device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as found:
            lost = found
    if lost is not None:
        raise LostContextError(one_line(lost)) from problem


def one_line(problem: BaseException) -> str:
    """An error in one line."""
    if isinstance(problem, torch.OutOfMemoryError):
        return "out of memory"
    text = " ".join(str(problem).split())[:300]
    return text if isinstance(problem, LostContextError) else f"{type(problem).__name__}: {text}"
