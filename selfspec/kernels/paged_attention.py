"""Attention of ragged rows over paged keys and values (Triton).

Decoding is bound by reading keys and values, so the work is split along them (flash-decoding, Dao et al. 2023). One
program takes one key head, a few of a row's queries with all query heads that share this key head, and one split of the
row's tokens. Where a tile of queries has one split, its program writes the result; else a second kernel combines the
splits in order. See `selfspec.kernels.attention_splits`. `selfspec.kernels.reference.attend` is the reference
implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.attention_splits import _combine, tile_splits, tiling_of
from selfspec.kernels.checks import check_attend
from selfspec.kernels.layout import Layout

SPLITS_PER_STEP = 16  # of the combination


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tile_rows: int | None = None,
    split: int | None = None,
) -> Tensor:
    """Causal attention of every new token over its row.

    Returns `[N, heads, head_dim]`, with zeros for padding.

    With both `tile_rows` and `split`, the order of summation is constant: the result for a token depends, bit for bit,
    on nothing but its query and its row's keys and values.

    Args:
        queries: `[N, heads, head_dim]`.
        keys: `[pages, page_size, kv_heads, head_dim]`; those of the new tokens are written already.
        values: of the same shape.
        layout: the rows of the call.
        scale: factor of the scores.
        window: attend to the last `window` positions only.
        chunk: attend to positions of the same chunk of this size only.
        softcap: bound the scores: softcap * tanh(score / softcap).
        sinks: `[heads]`, attention sinks: logits that take part in the softmax but have no value.
        tile_rows: rows of a tile of queries, a power of two of at least 16; None: chosen by the call's shape.
        split: tokens of a split, a multiple of 64; splits begin at multiples of it. None: chosen by the call's shape
            and the device. Partial results take 4 * head_dim + 8 bytes for every split, new token and head.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_attend`. `split` is not
            a positive multiple of 64.
    """
    check_attend(queries, keys, values, layout, sinks, split)
    count, heads, dim = queries.shape
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    tiling = tiling_of(queries, keys, layout, window, chunk, tile_rows, split)
    plan = tiling.splits
    is_direct = split is None or sinks is None  # with sinks, `_combine` rounds sums otherwise than `_split`
    has_parts = plan.most > 1 or not is_direct
    out = queries.new_empty((count, heads, dim))
    partial = queries.new_empty((plan.most, count, heads, dim), dtype=torch.float32) if has_parts else None
    tops, totals = queries.new_empty((2, plan.most, count, heads), dtype=torch.float32) if has_parts else (None, None)
    divided = (window or 0, chunk or 0, plan.parts, plan.least, plan.longest, count)
    shape = {
        "HEADS": heads, "DIM": dim, "BLOCK_D": tiling.block_d, "BLOCK_N": tiling.block_n, "QUERIES": tiling.queries,
        "SPLIT": split or 0, "WINDOW": window is not None,
        "CHUNK": chunk is not None, "SINKS": sinks is not None, "DIRECT": is_direct,
    }  # fmt: skip
    _split[(tiling.tiles + 1, kv_heads, plan.most)](
        queries, keys, values, out, partial, tops, totals, sinks,
        layout.starts, layout.counts, layout.lengths, layout.pages, layout.rows,
        scale, softcap or 0.0, *divided,
        queries.stride(0), queries.stride(1), layout.pages.stride(0), tiling.blocks,
        **shape, SHARE=heads // kv_heads, PAGE_SIZE=page_size, KV_HEADS=kv_heads, ROWS=tiling.rows,
        SOFTCAP=softcap is not None, PARTS=has_parts, UPCAST=triton.knobs.runtime.interpret, **tiling.options,
    )  # fmt: skip
    if has_parts:
        at_once = SPLITS_PER_STEP if split else min(SPLITS_PER_STEP, triton.next_power_of_2(plan.most))
        _combine[(count, heads)](
            partial, tops, totals, sinks, out,
            layout.rows, layout.starts, layout.counts, layout.lengths, *divided,
            **shape, BLOCK_S=at_once, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["window", "chunk", "parts", "least", "longest", "num_tokens", "blocks"])
def _split(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, tops_ptr, totals_ptr, sinks_ptr,
    starts_ptr, counts_ptr, lengths_ptr, pages_ptr, rows_ptr,
    scale, softcap, window, chunk, parts, least, longest, num_tokens, q_token, q_head, pages_row, blocks,
    HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    PARTS: tl.constexpr, DIRECT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    kv_head, split = tl.program_id(1), tl.program_id(2)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    if tl.program_id(0) == tl.num_programs(0) - 1:  # after the tiles: the padding
        if split == 0:
            _zero_padding(out_ptr, rows_ptr, num_tokens, kv_head, r, d, HEADS, SHARE, DIM, ROWS, BLOCK_D)
        return
    slot = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * QUERIES  # first query of this tile in its row
    count, length = tl.load(counts_ptr + slot), tl.load(lengths_ptr + slot)
    if first >= count:
        return
    context = length - count  # tokens before the new ones
    low, high, begin, size, splits = tile_splits(
        context + first, QUERIES, length, window, chunk, parts, least, longest,
        BLOCK_N, SPLIT, WINDOW, CHUNK,
    )  # fmt: skip
    if PARTS:
        if split >= splits:
            return
        low = tl.maximum(low, begin + split * size)
        high = tl.minimum(high, begin + split * size + size)
    start = tl.load(starts_ptr + slot)
    query = first + r // SHARE
    token = (start + query).to(tl.int64)
    head = kv_head * SHARE + r % SHARE
    live = (r // SHARE < QUERIES) & (query < count)
    q_mask = live[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + token[:, None] * q_token + (head * q_head)[:, None] + d[None, :], mask=q_mask, other=0.0)
    position = context + query
    top, total, acc = _over_pages(
        q, k_ptr, v_ptr, pages_ptr + slot * pages_row, low, high, position, kv_head, scale, softcap, window, chunk,
        DIM, PAGE_SIZE, KV_HEADS, ROWS, BLOCK_D, BLOCK_N, WINDOW, CHUNK, SOFTCAP, UPCAST,
    )  # fmt: skip
    if PARTS:  # noqa: SIM102 - known when compiling
        if (not DIRECT) | (splits > 1):
            line = (split * num_tokens + token) * HEADS + head
            tl.store(tops_ptr + line, top, mask=live)
            tl.store(totals_ptr + line, total, mask=live)
            tl.store(partial_ptr + line[:, None] * DIM + d[None, :], acc, mask=q_mask)
            return
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        acc = acc * tl.exp2(top - higher)[:, None]
        total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
    out = acc / tl.where(live, total, 1.0)[:, None]
    line = token * HEADS + head
    tl.store(out_ptr + line[:, None] * DIM + d[None, :], out.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit
def _over_pages(
    q, k_ptr, v_ptr, table, low, high, position, kv_head, scale, softcap, window, chunk,
    DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries `[ROWS, BLOCK_D]` to a row's tokens [low, high), of which a table names the pages.

    Returns a running softmax, see `_added`.
    """
    d = tl.arange(0, BLOCK_D)
    if UPCAST:
        q = q.to(tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    page = _pages(table, low, high, PAGE_SIZE, BLOCK_N)
    for base in range(low, high, BLOCK_N):
        kv = base + tl.arange(0, BLOCK_N)
        there = kv < high
        place = page * PAGE_SIZE + kv % PAGE_SIZE
        # The next step's pages are read a step ahead: so its keys can be requested while this step computes.
        page = _pages(table, base + BLOCK_N, high, PAGE_SIZE, BLOCK_N)
        at = (place * KV_HEADS + kv_head) * DIM
        kv_mask = there[:, None] & (d < DIM)[None, :]
        # Unwritten places may hold NaN. They are not read, since 0 * NaN would be NaN.
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=kv_mask, other=0.0)
        if UPCAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
        seen = _seen(kv, there, position, window, chunk, WINDOW, CHUNK)
        score = tl.where(seen, score * 1.4426950408889634, float("-inf"))
        top, total, acc = _added(score, v, top, total, acc)
    return top, total, acc


@triton.jit
def _zero_padding(
    out_ptr, rows_ptr, num_tokens, kv_head, r, d,
    HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Zero the results of places without a token, for the query heads of one key head."""
    zeros = tl.zeros((ROWS, BLOCK_D), out_ptr.dtype.element_ty)
    for base in range(0, num_tokens, ROWS):
        token = base + r
        empty = tl.load(rows_ptr + token, mask=token < num_tokens, other=0) < 0
        for head in range(SHARE):
            line = token.to(tl.int64) * HEADS + kv_head * SHARE + head
            tl.store(out_ptr + line[:, None] * DIM + d[None, :], zeros, mask=empty[:, None] & (d < DIM)[None, :])


@triton.jit
def _pages(table_ptr, base, high, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of the tokens of a step from `base` on; one if they share it."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table_ptr + base // PAGE_SIZE, mask=base < high, other=0).to(tl.int64)
    else:
        kv = base + tl.arange(0, BLOCK_N)
        return tl.load(table_ptr + kv // PAGE_SIZE, mask=kv < high, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["window", "chunk"])
def _seen(kv, there, position, window, chunk, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Which tokens `kv` each query attends to: those up to itself, within the reach."""
    key_at = kv[None, :]
    seen = there[None, :] & (key_at <= position[:, None])
    if WINDOW:
        seen = seen & (position[:, None] - key_at < window)
    if CHUNK:
        seen = seen & (key_at // chunk == position[:, None] // chunk)
    return seen


@triton.jit
def _added(score, v, top, total, acc):
    """Add scores and values to a running softmax in base 2: its maximum, sum of weights, and weighted values."""
    higher = tl.maximum(top, tl.max(score, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score - safe[:, None])
    fade = tl.exp2(top - safe)
    total = total * fade + tl.sum(weight, 1)
    acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return higher, total, acc
