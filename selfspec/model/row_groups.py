"""`Group`: the rows of a packed call that share one `sdpa` call, and the keys that their queries read.

Short rows share a call, padded to the longest of them; every long row has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.model.kv_cache import PackedRows, PagedCache, Span

SHORT = 32  # rows with at most so many new tokens share one padded call


@dataclass(slots=True)
class Group:
    """The rows of one attention call: R rows (or idle pages between them) with n queries each after padding."""

    positions: Tensor  # [R, n] position of each query; padding repeats a real one
    limit: int  # keys [0, limit) are read
    pages: slice | Tensor  # consecutive pages: one per row, or all those of a single row; or [R, pages per row]
    gather: slice | Tensor | None  # [R * n] index of each query in the packed call; None: they are all tokens in order
    scatter: tuple[slice | Tensor, slice | Tensor] | None  # (index in the packed call, index in R * n) of real queries
    single: bool  # one query: no mask is needed without a window or chunk
    is_long: bool = False  # one row of more than `SHORT` new tokens


def plan_groups(rows: PackedRows) -> list[Group]:
    """The groups of a packed call: one of all short rows, and one per long row."""
    starts, first = [], 0
    for span in rows.spans:
        starts.append(first)
        first += span.length
    short = [i for i, span in enumerate(rows.spans) if span.length <= SHORT]
    long = [i for i, span in enumerate(rows.spans) if span.length > SHORT]
    if len(rows.spans) == 1:
        return [_lone_group(rows, rows.spans[0], 0)]
    groups = [_lone_group(rows, rows.spans[i], starts[i]) for i in long]
    return ([_padded_group(rows, short, starts)] if short else []) + groups


def _lone_group(rows: PackedRows, span: Span, first: int) -> Group:
    """The group of one row, whose new tokens begin at `first` in the packed call."""
    limit, where = span.start + span.length, slice(first, first + span.length)
    pages = _page_index(rows.cache, [span.pages], limit, rows.device)
    is_all = span.length == rows.num_tokens
    return Group(
        rows.positions[:, where], limit, pages, None if is_all else where, None if is_all else (where, slice(None)),
        span.length == 1, span.length > SHORT,
    )  # fmt: skip


def _padded_group(rows: PackedRows, members: Sequence[int], starts: Sequence[int]) -> Group:
    spans = {rows.spans[i].pages[0]: i for i in members}
    width = max(rows.spans[i].length for i in members)
    limit = max(rows.spans[i].start + rows.spans[i].length for i in members)
    low, high = min(spans), max(spans)
    one_page = all(len(rows.spans[i].pages) == 1 for i in members)
    if one_page and high - low < 2 * len(members):  # a slice of pages, perhaps with idle ones, needs no copy
        order: list[int | None] = [spans.get(page) for page in range(low, high + 1)]
        pages: slice | Tensor = slice(low, high + 1)
    else:
        order = list(members)
        pages = _page_index(rows.cache, [rows.spans[i].pages for i in members], limit, rows.device)
    take: list[int] = []
    positions: list[list[int]] = []
    real: list[int] = []  # indices of the queries in the packed call
    padded: list[int] = []  # their indices in this group
    for line, i in enumerate(order):
        if i is None:  # an idle page: its queries attend to its first slot, and their results are dropped
            take += [0] * width
            positions.append([0] * width)
            continue
        span = rows.spans[i]
        offsets = [min(j, span.length - 1) for j in range(width)]
        take += [starts[i] + j for j in offsets]
        positions.append([span.start + j for j in offsets])
        real += range(starts[i], starts[i] + span.length)
        padded += range(line * width, line * width + span.length)
    as_is = take == list(range(rows.num_tokens))
    index = None if as_is else torch.tensor(take, device=rows.device)
    scatter = None if as_is else (torch.tensor(real, device=rows.device), torch.tensor(padded, device=rows.device))
    return Group(torch.tensor(positions, device=rows.device), limit, pages, index, scatter, False)


def _page_index(cache: PagedCache, tables: Sequence[Sequence[int]], limit: int, device: torch.device) -> slice | Tensor:
    need = cache.pages_for(limit)
    if len(tables) == 1:
        own = list(tables[0][:need])
        if own == list(range(own[0], own[0] + need)):
            return slice(own[0], own[0] + need)
    table = [[*pages[:need], *[pages[0]] * (need - len(pages))] for pages in tables]
    return torch.tensor(table, device=device)
