"""Attention backends with one signature.

    sdpa       torch's own, on every device (`selfspec.model.attention.attend_rows`)
    triton     selfspec's kernel over pages: ragged rows, windows, chunks, soft-caps and sinks
    flash      the flash-attn package, where it is installed (extra `flash`)
    varlen     torch's variable-length attention, in versions that read pages
    reference  the reference implementation of the kernel in torch: for tests, on any device

Calls that a backend does not support go through `sdpa`: in `flash` and `varlen` chunks, sinks and other page sizes; in
`triton` prompts in half precision, for which torch has faster kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.kernels import reference
from selfspec.kernels.layout import Layout
from selfspec.kernels.suite import has_triton
from selfspec.model.attention import Reach, attend_rows, limiting
from selfspec.model.kv_cache import PackedRows
from selfspec.model.row_groups import SHORT

# (packed rows, queries [heads, N, head_dim], the layer's keys, values, reach, scale, softcap, sinks)
Attend = Callable[[PackedRows, Tensor, Tensor, Tensor, Reach, float, float | None, Tensor | None], Tensor]
FLASH_PAGE = 256  # pages of flash-attn 2, and of torch's copy of it, hold a multiple of this


class Backend(NamedTuple):
    """An attention implementation. All return the result of `attend_rows`, up to rounding."""

    name: str
    attend: Attend
    page_multiple: int = 1  # the page size must be a multiple of this


def importable(device: torch.device | str) -> dict[str, Backend]:
    """The backends available for a device, by name."""
    found = {"sdpa": Backend("sdpa", attend_rows)}
    if torch.device(device).type == "cuda":
        if has_triton():
            found["triton"] = Backend("triton", _else_sdpa(_triton))
        if importlib.util.find_spec("flash_attn") is not None and _flash_function() is not None:
            found["flash"] = Backend("flash", _else_sdpa(_flash), FLASH_PAGE)
        if _varlen_function() is not None:
            found["varlen"] = Backend("varlen", _else_sdpa(_varlen), FLASH_PAGE)
    found["reference"] = Backend("reference", _else_sdpa(_reference))
    return found


def named(name: str, device: torch.device | str) -> Backend:
    """The backend of a name; ValueError where it is not available."""
    found = importable(device)
    if name not in found:
        raise ValueError(
            f"attention must be auto or one of {', '.join(found)} on {torch.device(device).type} here, got {name!r}"
        )
    return found[name]


def layout_of(rows: PackedRows) -> Layout:
    """The layout of a packed call for the kernels; computed once per call."""
    known: Layout | None = rows.plans.get("layout")
    if known is None:
        known = rows.plans["layout"] = _layout(rows)
    return known


def _layout(rows: PackedRows) -> Layout:
    size, device = rows.cache.page_size, rows.device
    starts, owners, slots = list[int](), list[int](), list[int]()
    for row, (pages, first, count) in enumerate(rows.spans):
        starts.append(len(owners))
        owners += [row] * count
        slots += [pages[p // size] * size + p % size for p in range(first, first + count)]
    counts = [span.length for span in rows.spans]
    lengths = [span.start + span.length for span in rows.spans]
    width = max(len(span.pages) for span in rows.spans)
    tables = [[*span.pages, *[0] * (width - len(span.pages))] for span in rows.spans]

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    places = torch.tensor(slots, device=device)
    return Layout(
        ints(starts), ints(counts), ints(lengths), ints(tables), ints(owners), places, rows.positions[0],
        max(counts), max(lengths),
    )  # fmt: skip


class Call(NamedTuple):
    """The arguments of `attend_rows`."""

    rows: PackedRows
    queries: Tensor
    keys: Tensor
    values: Tensor
    reach: Reach
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


def _else_sdpa(serve: Callable[[Call], Tensor | None]) -> Attend:
    """An attention function that leaves to `attend_rows` the calls for which `serve` returns None."""

    def attend(*given: Any) -> Tensor:
        call = Call(*given)
        out = serve(call)
        return attend_rows(*call) if out is None else out

    return attend


def _reference(call: Call) -> Tensor:
    return _by_kernel(call, reference.attend)


def _triton(call: Call) -> Tensor | None:
    from selfspec.kernels.paged_attention import attend

    return None if _is_prompt(call) else _by_kernel(call, attend)


def _is_prompt(call: Call) -> bool:
    """Whether torch's flash or cuDNN attention serves the call's long rows, see `attention._attend_long`."""
    long = [span.start + span.length for span in call.rows.spans if span.length > SHORT]
    return (
        bool(long)
        and call.queries.dtype in (torch.bfloat16, torch.float16)
        and call.queries.shape[-1] <= 256
        and limiting(call.reach, max(long)) == (None, None)
        and call.softcap is None
        and call.sinks is None
    )


def _by_kernel(call: Call, attend: Callable[..., Tensor]) -> Tensor:
    rows, queries, keys, values, reach, scale, softcap, sinks = call
    return attend(queries.transpose(0, 1), keys, values, layout_of(rows), scale, *reach, softcap, sinks)


def _flash(call: Call) -> Tensor | None:
    function = _flash_function()
    if function is None or not _flash_serves(call):
        return None
    layout = layout_of(call.rows)
    fed, held = _cumulative(call.rows, layout)
    return function(
        call.queries.transpose(0, 1), call.keys, call.values, fed, held, layout.most_new, layout.most_tokens,
        softmax_scale=call.scale, causal=True, window_size=_sides(call.reach), softcap=call.softcap or 0.0,
        block_table=layout.pages,
    )  # fmt: skip


def _varlen(call: Call) -> Tensor | None:
    function = _varlen_function()
    if function is None or call.softcap is not None or not _flash_serves(call):
        return None
    layout = layout_of(call.rows)
    fed, held = _cumulative(call.rows, layout)
    return function(
        call.queries.transpose(0, 1), call.keys, call.values, fed, held, layout.most_new, layout.most_tokens,
        scale=call.scale, window_size=(-1, 0) if call.reach.window is None else _sides(call.reach), enable_gqa=True,
        seqused_k=layout.lengths, block_table=layout.pages,
    )  # fmt: skip


def _flash_serves(call: Call) -> bool:
    dtype, head_dim = call.queries.dtype, call.queries.shape[-1]
    return (
        call.rows.cache.page_size % FLASH_PAGE == 0
        and (dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256)
        and call.reach.chunk is None
        and call.sinks is None
    )


def _sides(reach: Reach) -> tuple[int, int]:
    """flash-attn's `window_size`: visible tokens before and after a query; -1: no limit."""
    return (-1, -1) if reach.window is None else (reach.window - 1, 0)


def _cumulative(rows: PackedRows, layout: Layout) -> tuple[Tensor, Tensor]:
    """Cumulative numbers of new tokens and of all tokens, int32 `[rows + 1]` each, starting at 0."""
    known: tuple[Tensor, Tensor] | None = rows.plans.get("cumulative")
    if known is None:
        both = torch.stack([layout.counts, layout.lengths]).cumsum(1, dtype=torch.int32)
        fed, held = torch.nn.functional.pad(both, (1, 0))
        known = rows.plans["cumulative"] = (fed, held)
    return known


@cache
def _flash_function() -> Any:
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, OSError, AttributeError):  # another package of this name, or built for another torch
        return None


@cache
def _varlen_function() -> Any:
    try:
        call = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return call if "block_table" in inspect.signature(call).parameters else None
