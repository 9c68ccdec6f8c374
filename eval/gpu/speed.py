"""Every way to decode, at every batch size and context, on one synthetic target, as far as there is time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

import torch

from eval.exact import compared
from eval.gpu.faults import check_context, told
from eval.gpu.ours import busy_seconds, forward_seconds, rate_of, ready_engine
from eval.gpu.peers import peer_rate
from eval.gpu.record import Record
from eval.targets import Synthetic, random_prompts, synthetic_target

OURS = ("plain", "fixed", "adaptive")
PEERS = ("hf", "hf early exit", "hf static")
DRAFT_TOKENS = 4
NUM_TELLING = 2  # of the batch sizes, that come before all else
FIGURES = ("forwards", "busy", "exact mode")  # beside the cells
MAKING = "making it"
EXACT_TOKENS = 32  # new tokens of a row on which exact mode is tried


class Settings(NamedTuple):
    """What a run measures; `--smoke` has smaller figures of everything."""

    device: torch.device
    dtype: torch.dtype
    shapes: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    fixed_batches: tuple[int, ...]  # at which fixed settings and transformers are measured too
    long_batches: tuple[int, ...]  # of the longer contexts
    room: int  # new tokens a row may emit
    warm: float  # seconds of decoding before the clock counts, and while it does
    window: float
    forward_batch: int  # rows of the single forwards
    compile_seconds: float  # what a compiled static cache is supposed to need


class Cell(NamedTuple):
    context: int
    batch: int
    method: str


def steps_of(settings: Settings) -> Iterator[Cell | str]:
    """Cells and the names of other figures, the most telling first.

    Every way to decode at the first batch sizes comes first; then single forwards, the device's own time and exact
    mode; then the other batch sizes and contexts; and last what compiles.
    """
    first, *longer = settings.contexts
    for number, batch in enumerate(settings.batches):
        if number == NUM_TELLING:
            yield from FIGURES
        methods = ("plain", "fixed", "adaptive", "hf") if batch in settings.fixed_batches else ("plain", "adaptive")
        yield from (Cell(first, batch, method) for method in methods)
    if len(settings.batches) <= NUM_TELLING:
        yield from FIGURES
    if 1 in settings.batches:
        yield Cell(first, 1, "hf early exit")
    for context in longer:
        for batch in settings.long_batches:
            yield from (Cell(context, batch, method) for method in OURS)
        yield Cell(context, 1, "hf")
    yield Cell(first, 1, "hf static")


class Shape:
    """One synthetic target and what is measured of it, into `record`'s content under its name.

    Args:
        end: when it is to be over, in the seconds of `perf_counter`.
        found: what an earlier process measured of it before it lost its context; that is not tried again.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        end: float,
        record: Record,
        say: Callable[[str], None],
        found: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.settings, self.end, self.record, self.say = name, settings, end, record, say
        self.found = found or {"cells": [], "tried": [], "contexts": list(settings.contexts)}
        self.taken: dict[str, float] = {}  # seconds the last cell of a method took
        record.content["shapes"] = {name: self.found}

    @property
    def left(self) -> float:
        return self.end - perf_counter()

    def measure(self) -> None:
        """Make the target and measure what there is time for.

        Raises:
            LostContextError: the device cannot be used any more; `found["trying"]` is the figure that did it.
        """
        settings, longest = self.settings, max(self.settings.contexts) + 2 * self.settings.room
        self.found["trying"] = MAKING
        self.record.save()
        self.say(f"synthetic {self.name}: {MAKING}")
        start = perf_counter()
        try:
            target = synthetic_target(
                self.name,
                dtype=settings.dtype,
                device=settings.device,
                max_position_embeddings=longest,  # rows longer than some were trained at: speed does not mind
            )
        except Exception as problem:
            check_context(problem, settings.device)
            raise
        self.found |= {"target": target.about(), "sizes": sizes_of(target), "made_in": perf_counter() - start}
        self.found["engine"] = target.engine
        for step in steps_of(settings):
            label = self._label(step)
            if label not in self.found["tried"]:
                self._step(target, step, label)

    def _label(self, step: Cell | str) -> str:
        what = step if isinstance(step, str) else f"{step.method}, batch {step.batch}, context {step.context}"
        return f"{self.name}, {what}"

    def _step(self, target: Synthetic, step: Cell | str, label: str) -> None:
        method = step if isinstance(step, str) else step.method
        expected = self._expected(method)
        if self.left < expected:
            return self.record.skip(label, f"about {expected:.0f} s needed, {max(0, self.left):.0f} s left")
        if isinstance(step, Cell):
            needed, free = needed_bytes(target, step, room_of(step, self.settings)), free_bytes(self.settings.device)
            if needed > free:
                return self.record.skip(label, f"{needed / 2**30:.0f} GiB needed, {free / 2**30:.0f} GiB free")
        self.say(f"synthetic {label}")
        start = perf_counter()
        self._try(target, step, label)
        self.taken[method] = max(perf_counter() - start, 0.5 * self.taken.get(method, 0.0))
        return None

    def _expected(self, method: str) -> float:
        """Seconds that a step should take: what the last of its kind took, or the longest of all if it is the first."""
        about = self.settings.warm + self.settings.window
        if method == "hf static":
            return self.settings.compile_seconds
        if method == "exact mode":
            return 8 * about
        return self.taken.get(method, max(2 * about, *self.taken.values(), 0.0))

    def _try(self, target: Synthetic, step: Cell | str, label: str) -> None:
        """One failure costs one figure, but for a lost context, which nothing can be measured after."""
        self.found["trying"] = label
        self.found["tried"].append(label)
        self.record.save()
        try:
            if isinstance(step, Cell):
                self._rate(target, step)
            else:
                {"forwards": self._forwards, "busy": self._busy, "exact mode": self._exact}[step](target)
        except Exception as problem:
            check_context(problem, self.settings.device)
            self.record.skip(label, told(problem))
        self.record.save()
        if self.settings.device.type == "cuda":
            torch.cuda.empty_cache()

    def _rate(self, target: Synthetic, cell: Cell) -> None:
        settings = self.settings
        if cell.method in PEERS:
            rate = peer_rate(target, cell.method, cell.batch, cell.context, settings.window, DRAFT_TOKENS)
        else:
            options: dict[str, Any] = {"policy": cell.method}
            if cell.method == "fixed":
                options |= {"exit_layer": target.made.exit_layer, "num_draft_tokens": DRAFT_TOKENS}
            engine = ready_engine(target, cell.batch, cell.context, room_of(cell, settings), **options)
            rate = rate_of(engine, settings.warm, settings.window)
            target.remember(engine)
        self.found["cells"].append({**cell._asdict(), **rate.as_dict()})

    def _forwards(self, target: Synthetic) -> None:
        """Verifying several tokens per row beside one, and ragged rows beside even ones."""
        rows, context = self.settings.forward_batch, self.settings.contexts[0]
        engine = ready_engine(target, rows, context, self.settings.room, policy="plain")
        calls = {"one": [1] * rows, "even": [4] * rows, "ragged": ragged_lengths(rows)}
        seconds = {name: forward_seconds(engine, lengths) for name, lengths in calls.items()}
        self.found["forwards"] = {"rows": rows, "context": context, "lengths": calls, "seconds": seconds}

    def _exact(self, target: Synthetic) -> None:
        """Whether speculation is plain decoding bit for bit in exact mode here, and what that costs."""
        found = {}
        for rows in (1, 4):
            prompts = random_prompts(target.stack.vocab_size, rows, self.settings.contexts[0])
            found[str(rows)] = compared(target, prompts, EXACT_TOKENS, perf_counter)
        self.found["exact"] = {"tokens": EXACT_TOKENS, "by_batch": found}

    def _busy(self, target: Synthetic) -> None:
        if self.settings.device.type != "cuda":
            raise ValueError("only a CUDA device is asked how busy it is")
        engine = ready_engine(target, 1, self.settings.contexts[0], self.settings.room, policy="plain")
        self.found["busy_seconds_per_plain_round"] = busy_seconds(engine)


def ragged_lengths(rows: int) -> list[int]:
    """From 1 to 7 tokens per row, 4 in the mean."""
    pairs = [length for i in range(rows // 2) for length in (1 + i % 4, 7 - i % 4)]
    return pairs + [4] * (rows % 2)


def room_of(cell: Cell, settings: Settings) -> int:
    """New tokens of a row; of many rows each is slower, and needs fewer."""
    return settings.room if cell.batch <= 8 else settings.room // 3


def sizes_of(target: Synthetic) -> dict[str, float]:
    """Bytes a plain token reads (weights, and keys and values per token of context), and the head in layers."""
    model, config = target.stack.model, target.stack.config.get_text_config()
    own = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    layer = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    kv = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * embedding.element_size()
    unread = 0 if head is embedding else own[id(embedding)]  # of an embedding, one row is read
    return {
        "weight_bytes": sum(own.values()),
        "read_bytes": sum(own.values()) - unread,
        "kv_bytes_per_token": kv,
        "head_in_layers": head.numel() * head.element_size() / layer,
    }


def needed_bytes(target: Synthetic, cell: Cell, room: int) -> float:
    """What a cell's keys, values and activations take, roughly."""
    tokens = cell.batch * (cell.context + room)
    copies = 1.1 if cell.method in OURS else 2.2  # transformers grows its cache by copying
    return copies * tokens * sizes_of(target)["kv_bytes_per_token"] + 2**30 * (cell.method in PEERS)


def free_bytes(device: torch.device) -> float:
    """Free memory of the device, without what torch keeps for itself and would use again; no bound on a CPU."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
