"""What a forward costs by the number of its tokens and layers, beside how fast this machine reads memory."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any

import torch

from eval.summary import spread
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.stack import Stack

BYTES = 1 << 29  # read to measure bandwidth: far more than any cache holds
CONTEXT, ROOM, ROWS = 128, 160, 16
WIDTHS = (1, 2, 4, 5, 8, 16)  # tokens of one row


def clock() -> tuple[str, Callable[[], float]]:
    """Processor time where one thread computes, so that others' work on the machine counts less; else wall time."""
    return ("processor time", thread_time) if torch.get_num_threads() == 1 else ("wall time", perf_counter)


def bytes_read(stack: Stack) -> int:
    """Weights that a token of plain decoding reads: all layers', the last norm's and the head's, as they are packed."""
    if stack.compiled is not None:
        return stack.compiled.num_bytes
    head = stack.model.get_output_embeddings().weight
    embedding = stack.model.get_input_embeddings().weight
    parameters = {id(p): p for p in stack.model.parameters() if p is not embedding}
    return sum(p.nbytes for p in (parameters | {id(head): head}).values())


def pieces(stack: Stack, exit_layer: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of every piece: a median with its spread, pieces taken in turn."""
    name, now = clock()
    cache = PagedCache(ROWS, ROOM)
    tokens = torch.randint(stack.vocab_size, (ROWS * CONTEXT,), generator=torch.Generator().manual_seed(0))
    big = torch.zeros(BYTES // 4)

    def rows(count: int, width: int) -> PackedRows:
        return PackedRows(cache, [Span([i], CONTEXT, width) for i in range(count)])

    def forward(count: int, width: int, stop: int = stack.num_layers) -> Any:
        return stack.run(rows(count, width), 0, stop, tokens[: count * width])

    def whole(count: int, width: int) -> Any:
        return stack.logits(forward(count, width))

    with torch.inference_mode():
        stack.run(PackedRows(cache, [Span([i], 0, CONTEXT) for i in range(ROWS)]), 0, stack.num_layers, tokens)
        hidden = forward(1, 1)
        calls: dict[str, Callable[[], Any]] = {f"1 row of {n}": lambda n=n: whole(1, n) for n in WIDTHS}  # type: ignore[misc]
        calls |= {f"{ROWS} rows of 1": lambda: whole(ROWS, 1), "head": lambda: stack.logits(hidden, exit_layer)}
        calls[f"{exit_layer} layers"] = lambda: forward(1, 1, exit_layer)
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for piece, call in calls.items():
                call()  # so that the reading finds in the caches what the last one of its kind left there
                for _ in range(2):
                    taken[piece].append(_seconds(call, now))
        taken["memory"] = [_seconds(big.max, now) for _ in range(2 * repeats)]  # apart: it leaves the caches empty
    milliseconds = {piece: spread(1e3 * s for s in seconds)._asdict() for piece, seconds in taken.items()}
    return {"clock": name, "milliseconds": milliseconds, **ratios(stack, exit_layer, milliseconds)}


def _seconds(call: Callable[[], Any], now: Callable[[], float]) -> float:
    start = now()
    call()
    return now() - start


def ratios(stack: Stack, exit_layer: int, milliseconds: dict[str, dict[str, float]]) -> dict[str, float]:
    """What the targets are about."""
    ms = {piece: values["median"] for piece, values in milliseconds.items()}
    plain, layers = ms["1 row of 1"], ms["1 row of 1"] - ms["head"]
    bandwidth = BYTES / 1e6 / ms["memory"]  # GB/s
    return {
        "megabytes_per_token": bytes_read(stack) / 1e6,
        "bandwidth_gb_s": bandwidth,
        "plain_over_bytes_by_bandwidth": plain / (bytes_read(stack) / 1e6 / bandwidth),
        "verify_5_over_1": ms["1 row of 5"] / plain,
        "verify_8_over_1": ms["1 row of 8"] / plain,
        "draft_over_its_share_of_layers": ms[f"{exit_layer} layers"] / (layers * exit_layer / stack.num_layers),
        "throughput_16_over_1": ROWS * plain / ms[f"{ROWS} rows of 1"],
    }
