"""Bytes that attention over pages moves: counted from the arguments of its launches, and by Triton's interpreter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from selfspec.kernels import paged_attention
from selfspec.kernels.layout import Layout


class Launch(NamedTuple):
    """One kernel as a call launches it."""

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]


class Moved(NamedTuple):
    """Bytes read or written by a call, and its programs that have something to do."""

    keys: int  # and values
    queries: int
    results: int  # and partial results, written and read
    programs: int

    @property
    def total(self) -> int:
        return self.keys + self.queries + self.results


def launches_of(call: Callable[[], Any]) -> list[Launch]:
    """What a call of `paged_attention.attend` would launch."""
    made: list[Launch] = []

    class Instead:
        def __init__(self, kernel: Any) -> None:
            self.name, self.names = kernel.fn.__name__, list(inspect.signature(kernel.fn).parameters)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                made.append(Launch(self.name, grid, dict(zip(self.names, args, strict=False)) | kwargs))

            return launch

    kernels = {name: Instead(getattr(paged_attention, name)) for name in ("_split", "_combine")}
    with patch.multiple(paged_attention, **kernels):
        call()
    return made


def moved_by(launches: list[Launch]) -> Moved:
    """Bytes by the arguments of the launches, without the description of rows: a few bytes per program."""
    a = launches[0].arguments
    itemsize, line = a["q_ptr"].element_size(), a["DIM"] * a["q_ptr"].element_size()
    keys = queries = results = programs = 0
    for count, length in zip(a["counts_ptr"].tolist(), a["lengths_ptr"].tolist(), strict=True):
        for first in range(0, count, a["QUERIES"]):
            low, high, begin, size = _range(a, length - count + first, length)
            splits = -(-(high - begin) // size) if a["PARTS"] else 1
            own = min(a["QUERIES"], count - first) * a["HEADS"]  # queries times heads
            keys += 2 * (high - low) * a["KV_HEADS"] * line
            queries += splits * own * line
            results += own * line
            if splits > 1 or not a["DIRECT"]:
                results += 2 * splits * own * (4 * a["DIM"] + 8)
            programs += splits * a["KV_HEADS"]
    padding = int((a["rows_ptr"] < 0).sum())
    assert itemsize == a["k_ptr"].element_size()
    return Moved(keys, queries, results + padding * a["HEADS"] * line, programs)


def _range(a: dict[str, Any], at: int, length: int) -> tuple[int, int, int, int]:
    """Tokens [low, high) of a tile; where its splits begin, and their size."""
    high, low = min(at + a["QUERIES"], length), 0
    if a["WINDOW"]:
        low = max(low, at - a["window"] + 1)
    if a["CHUNK"]:
        low = max(low, at // a["chunk"] * a["chunk"])
    low = low // a["BLOCK_N"] * a["BLOCK_N"]
    if a["SPLIT"]:
        return low, high, low // a["SPLIT"] * a["SPLIT"], a["SPLIT"]
    wanted = max(min((high - low) // a["least"], a["parts"]), -(-(high - low) // a["longest"]))
    return low, high, low, -(-(high - low) // wanted // a["BLOCK_N"]) * a["BLOCK_N"]


def decoding(batch: int, context: int, new: int, heads: int, kv_heads: int, dim: int, capacity: int) -> tuple[Any, ...]:
    """Arguments of `attend` for rows of `context` tokens, `new` of them new, in a recording for `capacity` tokens.

    In bfloat16; they are not to be computed with, since all tokens lie in one page.
    """
    count = batch * new
    queries = torch.empty(count, heads, dim, dtype=torch.bfloat16)
    keys, values = torch.empty(2, 1, 64, kv_heads, dim, dtype=torch.bfloat16)
    ints = torch.arange(batch, dtype=torch.int32)
    layout = Layout(
        ints * new, torch.full_like(ints, new), torch.full_like(ints, context),
        torch.zeros(batch, -(-capacity // 64), dtype=torch.int32), ints.repeat_interleave(new),
        torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64), new, capacity,
    )  # fmt: skip
    return queries, keys, values, layout, dim**-0.5
