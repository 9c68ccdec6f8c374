"""A draft's tokens in one call of the compiled body: no Python runs between them, and no token waits for it.

After the weights of a pass have been streamed through the caches, whatever runs next is read from memory: in Python and
torch, that is tens of microseconds for every operation, several times a token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.kernels import compiled_call as c
from selfspec.target.cache import PackedRows, PagedCache, Span
from selfspec.target.compiled import CompiledBody
from selfspec.target.packed import Packed


class Stops(NamedTuple):
    """Where rows end their drafts before their length; see `selfspec.control.plan.Plan`."""

    min_confidence: float = 0.0
    edges: Sequence[float] = ()  # between bins of confidence
    calibration: Sequence[float] | None = None  # by bin: how often a token is right; None: no rows stop together
    least: float = 0.0  # mean survival at which they go on


class Written(NamedTuple):
    """What rows drafted, and the hidden states that it was picked from: of each row's last token, and of all it drafted
    but the last."""

    tokens: list[list[int]]
    sure: list[list[float]]
    seconds: list[list[int]]
    hidden: Tensor  # [rows, most, hidden_size]
    taps: list[Tensor]  # of the tapped layers: the same
    taken: list[tuple[float, float, float]]  # seconds of every step: layers, head, pick


def write(
    body: CompiledBody,
    cache: PagedCache,
    spans: Sequence[Span],
    last: Sequence[int],
    exit_layer: int,
    head: tuple[Packed, Tensor | None],
    how: bytes,
    stops: Stops,
    with_sure: bool,
    with_seconds: bool,
    tapped: Sequence[int] = (),
    rounded: bool = False,
) -> Written:
    """Draft each row's tokens in lock step, as far as its length and the stops let it.

    Args:
        spans: of every row, the position of its last token, and how many tokens to draft, at least 1 in some row.
        last: every row's last token.
        head: what picks are made from, and the tokens that it is of; None: all.
        how: what `kernels.compiled_pick.told` says of every row.
        tapped: layers below the exit to look in at.
        rounded: draft by copies of the layers in 4 bits.
    """
    count, most, size = len(spans), max(span.length for span in spans), body.embedding.shape[1]
    packed, names = head
    longest, (cos, sin) = body.reach(PackedRows(cache, [span for span in spans if span.length]))
    row_pages = max(len(span.pages) for span in spans)
    pages = [page for span in spans for page in (*span.pages, *[0] * (row_pages - len(span.pages)))]
    told = [_ints(each) for each in (pages, [s.start for s in spans], [s.length for s in spans], last)]
    counts, tokens, seconds = (_ints([0] * size) for size in (count, count * most, count * most * with_seconds))
    sure, taken = (ctypes.c_float * (count * most))(), (ctypes.c_double * (3 * most))()
    hidden = body.embedding.new_empty(count, most, size)
    taps = [torch.empty_like(hidden) for _ in tapped]
    places = (ctypes.c_void_p * exit_layer)()
    for layer, tap in zip(tapped, taps, strict=True):
        places[layer - 1] = tap.data_ptr()
    stop, _kept = stop_of(stops)
    drafting = c.Drafting(
        *(count, most, packed.num_outputs, *map(ctypes.addressof, told), row_pages),
        *(_address(ctypes.c_char_p(how)), None if names is None else names.data_ptr(), cos.data_ptr(), sin.data_ptr()),
        *(body.embedding.data_ptr(), body.last_norm.data_ptr(), body.norm.eps),
        stop,
        *(ctypes.addressof(counts), ctypes.addressof(tokens), ctypes.addressof(seconds) if with_seconds else None),
        *(ctypes.addressof(sure) if with_sure else None, hidden.data_ptr()),
        *(ctypes.addressof(places) if tapped else None, ctypes.addressof(taken), None, 0),
    )
    model, layers = body.rounded_structs(cache, exit_layer) if rounded else body.structs(cache)
    lib, threads = c.functions(), body.threads(count)
    model_at, drafting_at, head_at = ctypes.byref(model), ctypes.byref(drafting), ctypes.byref(packed.struct)
    floats = lib.selfspec_draft_floats(model_at, drafting_at, exit_layer, head_at, longest, threads)
    room = hidden.new_empty(floats)
    lib.selfspec_draft(
        *(model_at, ctypes.byref(layers), exit_layer, head_at),
        *(drafting_at, longest, room.data_ptr(), threads),
    )
    parts = [(r * most, r * most + counts[r]) for r in range(count)]
    steps = [(taken[i], taken[i + 1], taken[i + 2]) for i in range(0, 3 * max(counts), 3)]
    return Written(
        [tokens[low:high] for low, high in parts],
        [sure[low:high] if with_sure else [] for low, high in parts],
        [seconds[low:high] if with_seconds else [] for low, high in parts],
        *(hidden, taps, steps),
    )


def joined(written: Tensor, counts: Sequence[int], last: Tensor, widths: Sequence[int]) -> Tensor:
    """Row after row `[N, hidden_size]`: so many of `written` `[rows, most, hidden_size]`, then so many of `last`."""
    size = 4 * last.shape[-1]
    out = last.new_empty(sum(counts) + sum(widths), last.shape[-1])
    to, own, apart = out.data_ptr(), last.data_ptr(), size * written.shape[1]
    for row, (count, width) in enumerate(zip(counts, widths, strict=True)):
        ctypes.memmove(to, written.data_ptr() + row * apart, count * size)
        ctypes.memmove(to + count * size, own, width * size)
        to, own = to + (count + width) * size, own + width * size
    return out


def _ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def stop_of(stops: Stops) -> tuple[c.Stop, Any]:
    """What compiled functions are told, and what that points to, to be kept as long."""
    edges, calibration = doubles(stops.edges), None if stops.calibration is None else doubles(stops.calibration)
    told = None if calibration is None else ctypes.addressof(calibration)
    return c.Stop(stops.min_confidence, stops.least, ctypes.addressof(edges), told, len(edges)), (edges, calibration)


def doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(values))(*values)


def _address(text: ctypes.c_char_p) -> int | None:
    return ctypes.cast(text, ctypes.c_void_p).value
