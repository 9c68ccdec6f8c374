"""What `python -m eval gpu` measures of a shape, and in which order: its configuration and its cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from eval.config import check, check_least, option

TEMPERATURE = 0.5  # of all rows but those of peers: the acceptance of greedy outputs differs from the set one by 0.1
DRAFT_TOKENS = 4  # of "fixed" and of transformers' early exit
OURS = ("plain", "fixed", "adaptive", "plain, exact")
TRANSFORMERS = ("hf", "hf early exit", "hf static")
NUM_FIRST = 2  # batch sizes that are measured before all others
PEER = "peer"  # the kind of the methods of peers' folders; the option is the folder's name
# Cells that are no rate of a method.
BUSY, COSTS, ATTENTION, PREFILL, PAUSE = "busy", "costs", "attention", "prefill", "pause"
LAYERS, COMPILED_LAYERS = "layers", "compiled layers"


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """The configuration of `python -m eval gpu`."""

    shapes: tuple[str, ...] = option(("llama-3-8b", "smollm2-135m"), "Shapes, or config.json files.")
    minutes: float = option(9.5, "Time limit; figures without enough time are reported as not measured.")
    batch_sizes: tuple[int, ...] = option(
        (1, 32, 8, 128, 4, 64, 2, 16), "Rows decoded together, in order of importance."
    )
    peer_batch_sizes: tuple[int, ...] = option((1, 8, 32), "Batch sizes of peers, of exact mode and of long contexts.")
    contexts: tuple[int, ...] = option((1024, 8192), "Cached tokens per row; the first with all batch sizes.")
    draft_lengths: tuple[int, ...] = option((2, 6), f"Other draft lengths of fixed than {DRAFT_TOKENS}.")
    peer: tuple[str, ...] = option((), "Folders of peers, each with a selfspec_peer.json; see docs/measurements.md.")
    dtype: str = option("bfloat16", "Number format of the weights.")
    device: str = option("cuda", "Device; 'cpu' is for trying the command.")
    new_tokens: int = option(768, "New tokens per row; a third of it in batches of more than eight rows.")
    warm_seconds: float = option(0.4, "Seconds of decoding before the measurement.")
    window_seconds: float = option(0.8, "Seconds of the measurement.")
    compile_seconds: float = option(60.0, "Expected seconds of a peer that compiles, and twice those of a few layers.")

    def __post_init__(self) -> None:
        check_least(self, 1, "new_tokens")
        check_least(self, 0, "minutes", "warm_seconds", "window_seconds", "compile_seconds")
        for name, least in (("batch_sizes", 1), ("contexts", 2)):
            given = getattr(self, name)
            check(bool(given) and min(given) >= least, name, f"numbers of at least {least}", list(given))
        check(all(n >= 1 for n in self.draft_lengths), "draft_lengths", "at least 1", list(self.draft_lengths))
        check(bool(self.shapes), "shapes", "at least one", [])
        dtypes = ("bfloat16", "float16", "float32")
        check(self.dtype in dtypes, "dtype", f"among {', '.join(dtypes)}", self.dtype)

    def new_tokens_of(self, batch: int) -> int:
        """New tokens per row; rounds of large batches take longer, so fewer are needed."""
        return self.new_tokens if batch <= 8 else max(1, self.new_tokens // 3)

    @property
    def first_batches(self) -> list[int]:
        """The batch sizes that are measured before all others."""
        return list(dict.fromkeys(self.batch_sizes))[:NUM_FIRST]


class Cell(NamedTuple):
    """One measurement: a method's rate, or another figure, at a batch size and context."""

    context: int
    batch: int
    method: str

    def __str__(self) -> str:
        return f"{self.method}, batch {self.batch}, context {self.context}"

    @property
    def kind(self) -> str:
        """Cells of one kind take about the same time."""
        return self.method.partition(":")[0]

    @property
    def option(self) -> str:
        """The part of the method after a colon."""
        return self.method.partition(":")[2]


def cells_of(config: GpuConfig) -> Iterator[Cell]:
    """All cells, the most important first, without repetition."""
    yield from dict.fromkeys(_ordered(config))


def _ordered(config: GpuConfig) -> Iterator[Cell]:
    first, *longer = dict.fromkeys(config.contexts)
    peers = [batch for batch in dict.fromkeys(config.batch_sizes) if batch in config.peer_batch_sizes]
    for batch in config.first_batches:
        for method in ("plain", f"{BUSY}:plain", "fixed", f"{BUSY}:fixed", "adaptive", COSTS):
            yield Cell(first, batch, method)
        if batch == 1:
            yield Cell(first, 1, "hf")
    yield from (Cell(first, batch, LAYERS) for batch in config.first_batches)
    for batch in config.batch_sizes:
        yield from (Cell(first, batch, method) for method in ("plain", "adaptive"))
    yield Cell(first, config.first_batches[0], COMPILED_LAYERS)
    yield from (Cell(first, batch, "plain, exact") for batch in peers)
    yield from (Cell(context, 1, PREFILL) for context in (first, *longer))
    yield Cell(max(config.contexts), 1, PAUSE)
    yield from (Cell(context, batch, ATTENTION) for context in (first, *longer) for batch in config.first_batches)
    methods = ("fixed", *(f"fixed:{length}" for length in config.draft_lengths))
    yield from (Cell(first, batch, method) for batch in peers for method in methods)
    yield from (Cell(first, batch, "hf") for batch in peers)
    if 1 in peers:
        yield Cell(first, 1, "hf early exit")
    yield from (
        Cell(first, batch, f"{PEER}:{Path(folder).resolve().name}") for folder in config.peer for batch in peers
    )
    for context in longer:
        yield from (Cell(context, batch, method) for batch in peers for method in ("plain", "fixed", "adaptive", "hf"))
    if 1 in peers:
        yield Cell(first, 1, "hf static")
