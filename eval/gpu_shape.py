"""Measure one synthetic target: methods, batch sizes and contexts, as far as time and memory allow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from eval.config import check, check_least, option
from eval.gpu_rates import PEERS, busy_rounds, device_speed, forward_seconds, peer_rate, rate_of, ready_engine
from eval.measurement import device
from eval.synthetic import Synthetic, synthetic_target

OURS = ("plain", "fixed", "adaptive")
DRAFT_TOKENS = 4  # of fixed settings and of transformers' early exit
NUM_FIRST = 2  # batch sizes that are measured before all else
FIGURES = ("busy", "forwards")  # other figures than the rates of cells
OPENING = "opening"
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """The configuration of `python -m eval gpu`."""

    shapes: tuple[str, ...] = option(("llama-3-8b", "llama-3.2-1b", "llama-2-7b"), "Shapes, or config.json files.")
    minutes: float = option(9.5, "Time limit; figures without enough time are reported as not measured.")
    batch_sizes: tuple[int, ...] = option(
        (1, 32, 8, 128, 4, 64, 2, 16), "Rows decoded together, in order of importance."
    )
    peer_batch_sizes: tuple[int, ...] = option((1, 8, 32), "Batch sizes that also measure fixed and transformers.")
    contexts: tuple[int, ...] = option((1024, 8192), "Cached tokens per row; the first with all batch sizes.")
    dtype: str = option("bfloat16", "Number format of the weights.")
    device: str = option("cuda", "Device; 'cpu' is for trying the command.")
    new_tokens: int = option(768, "New tokens per row; a third of it in batches of more than eight rows.")
    warm_seconds: float = option(0.6, "Seconds of decoding before the measurement.")
    window_seconds: float = option(1.2, "Seconds of the measurement.")
    forward_rows: int = option(32, "Rows of the measured forwards.")
    compile_seconds: float = option(100.0, "Expected seconds to compile transformers' static cache.")

    def __post_init__(self) -> None:
        check_least(self, 1, "new_tokens", "forward_rows")
        check_least(self, 0, "minutes", "warm_seconds", "window_seconds", "compile_seconds")
        for name, least in (("batch_sizes", 1), ("contexts", 2)):
            given = getattr(self, name)
            check(bool(given) and min(given) >= least, name, f"numbers of at least {least}", list(given))
        check(bool(self.shapes), "shapes", "at least one", [])
        dtypes = ("bfloat16", "float16", "float32")
        check(self.dtype in dtypes, "dtype", f"among {', '.join(dtypes)}", self.dtype)

    def new_tokens_of(self, batch: int) -> int:
        """New tokens per row; rounds of large batches take longer, so fewer are needed."""
        return self.new_tokens if batch <= 8 else max(1, self.new_tokens // 3)


class Cell(NamedTuple):
    """One measured rate: tokens per second of a method at a batch size and context."""

    context: int
    batch: int
    method: str

    def __str__(self) -> str:
        return f"{self.method}, batch {self.batch}, context {self.context}"


def steps_of(config: GpuConfig) -> Iterator[Cell | str]:
    """Cells and names of other figures, the most important first.

    All methods at the first batch sizes come first, then busy time and forwards, then the other batch sizes and
    contexts, and last the method that compiles.
    """
    first, *longer = dict.fromkeys(config.contexts)
    batches = list(dict.fromkeys(config.batch_sizes))
    for number, batch in enumerate(batches):
        if number == NUM_FIRST:
            yield from FIGURES
        methods = (*OURS, "hf") if batch in config.peer_batch_sizes else ("plain", "adaptive")
        yield from (Cell(first, batch, method) for method in methods)
    if len(batches) <= NUM_FIRST:
        yield from FIGURES
    if 1 in batches:
        yield Cell(first, 1, "hf early exit")
    for context in longer:
        few = [batch for batch in batches if batch in config.peer_batch_sizes]
        yield from (Cell(context, batch, method) for batch in few for method in OURS)
        yield Cell(context, 1, "hf")
    yield Cell(first, 1, "hf static")


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
            target = synthetic_target(self.name, dtype=dtype, device=self.device, max_position_embeddings=longest)
        except Exception as problem:
            check_context(problem, self.device)
            raise
        self.found |= {"target": target.about(), "sizes": sizes_of(target), "engine": target.engine}
        self.found |= {"device": device(self.device), "made_in": perf_counter() - begun}
        for step in steps_of(self.config):
            if str(step) not in self.found["tried"]:
                self.step(target, step)

    def trying(self, what: str) -> None:
        print(f"[{perf_counter() - self.start:5.0f} s] synthetic {self.name}: {what}", file=sys.stderr, flush=True)
        self.found["trying"] = what
        self.save(self.found)

    def skip(self, what: str, why: str) -> None:
        self.found["not_measured"].append({"what": what, "why": why})
        self.save(self.found)

    def step(self, target: Synthetic, step: Cell | str) -> None:
        """Measure one figure, if there is time and memory. A failure is recorded, except for a lost context."""
        kind = step.method if isinstance(step, Cell) else step
        expected, left = self.expected(kind), self.end - perf_counter()
        if left < expected:
            return self.skip(str(step), f"about {expected:.0f} s needed, {max(0, left):.0f} s left")
        if isinstance(step, Cell):
            needed, free = needed_bytes(target, step, self.config.new_tokens_of(step.batch)), free_bytes(self.device)
            if needed > free:
                return self.skip(str(step), f"{needed / 2**30:.0f} GiB needed, {free / 2**30:.0f} GiB free")
        self.found["tried"].append(str(step))
        self.trying(str(step))
        begun = perf_counter()
        try:
            if isinstance(step, Cell):
                self.rate(target, step)
            else:
                {"forwards": self.forwards, "busy": self.busy}[step](target)
        except Exception as problem:
            check_context(problem, self.device)
            self.skip(str(step), one_line(problem))
        self.save(self.found)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.taken[kind] = max(perf_counter() - begun, 0.5 * self.taken.get(kind, 0.0))
        return None

    def expected(self, kind: str) -> float:
        """Expected seconds of a figure: those of the last one of its kind, or of the longest figure so far."""
        if kind == "hf static":
            return self.config.compile_seconds
        least = 2 * (self.config.warm_seconds + self.config.window_seconds)
        return self.taken.get(kind, max(least, *self.taken.values(), 0.0))

    def rate(self, target: Synthetic, cell: Cell) -> None:
        config = self.config
        if cell.method in PEERS:
            rate = peer_rate(target, cell.method, cell.batch, cell.context, config.window_seconds, DRAFT_TOKENS)
        else:
            settings, new_tokens = _settings(target, cell.method), config.new_tokens_of(cell.batch)
            engine = ready_engine(target, cell.batch, cell.context, new_tokens, **settings)
            rate = rate_of(engine, config.warm_seconds, config.window_seconds)
            target.remember(engine)  # keeps what the policy has learned, as between calls of the library
        self.found["cells"].append({**cell._asdict(), **rate.as_dict()})

    def forwards(self, target: Synthetic) -> None:
        """Time forwards over one token per row, over four, and over ragged rows with a mean of four."""
        rows, context = self.config.forward_rows, self.config.contexts[0]
        engine = ready_engine(target, rows, context, self.config.new_tokens, policy="plain")
        calls = {"one": [1] * rows, "even": [4] * rows, "ragged": ragged_lengths(rows)}
        seconds = {name: forward_seconds(engine, lengths) for name, lengths in calls.items()}
        self.found["forwards"] = {"rows": rows, "context": context, "seconds": seconds}

    def busy(self, target: Synthetic) -> None:
        """Measure the device's busy time per round."""
        if self.device.type != "cuda":
            raise ValueError("the busy time is measured only on a CUDA device")
        self.found["busy"] = {}
        for method in ("plain", "fixed"):
            context, new_tokens = self.config.contexts[0], self.config.new_tokens
            engine = ready_engine(target, 1, context, new_tokens, **_settings(target, method))
            self.found["busy"][method] = busy_rounds(engine)


def _settings(target: Synthetic, policy: str) -> dict[str, Any]:
    """The engine's options of a policy."""
    fixed = {"exit_layer": target.made.exit_layer, "num_draft_tokens": DRAFT_TOKENS}
    return {"policy": policy, **(fixed if policy == "fixed" else {})}


def ragged_lengths(rows: int) -> list[int]:
    """Between 1 and 7 tokens per row, with a mean of 4."""
    pairs = [length for i in range(rows // 2) for length in (1 + i % 4, 7 - i % 4)]
    return pairs + [4] * (rows % 2)


def sizes_of(target: Synthetic) -> dict[str, float]:
    """Bytes of all weights, of those read per token, and of the KV cache per token."""
    model, config = target.stack.model, target.stack.config.get_text_config()
    own = sum(p.nbytes for p in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    kv = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * embedding.element_size()
    unread = 0 if head is embedding else embedding.nbytes  # only one row of an embedding is read
    return {"weight_bytes": own, "read_bytes": own - unread, "kv_bytes_per_token": kv}


def needed_bytes(target: Synthetic, cell: Cell, new_tokens: int) -> float:
    """Estimated bytes of a cell's KV cache and activations."""
    copies = 1.1 if cell.method in OURS else 2.2  # transformers grows its cache by copying
    tokens = cell.batch * (cell.context + new_tokens)
    return copies * tokens * sizes_of(target)["kv_bytes_per_token"] + 2**30 * (cell.method in PEERS)


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
