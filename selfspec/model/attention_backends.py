"""Attention backends with one signature.

    sdpa       torch's own, on every device (`selfspec.model.attention.attend_rows`)
    triton     selfspec's kernel over pages: ragged rows, windows, chunks, soft-caps and sinks
    reference  the reference implementation of the kernel in torch: for tests, on any device

Prompts in half precision go from `triton` to `sdpa`, for which torch has faster kernels.
"""

from __future__ import annotations

from collections.abc import Callable
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


class Backend(NamedTuple):
    """An attention implementation. All return the result of `attend_rows`, up to rounding."""

    name: str
    attend: Attend


def importable(device: torch.device | str) -> dict[str, Backend]:
    """The backends available for a device, by name."""
    found = {"sdpa": Backend("sdpa", attend_rows)}
    if torch.device(device).type == "cuda" and has_triton():
        found["triton"] = Backend("triton", _else_sdpa(_triton))
    found["reference"] = Backend("reference", _else_sdpa(_reference))
    return found


def choose(device: torch.device | str) -> Backend:
    """The kernel over pages where there is one, which reads no page twice and needs no mask; else `sdpa`."""
    found = importable(device)
    return found.get("triton", found["sdpa"])


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
