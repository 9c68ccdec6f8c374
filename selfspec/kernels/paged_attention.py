"""Attention of ragged rows over paged keys and values (Triton).

Decoding is bound by reading keys and values, so the work is split along them (flash-decoding, Dao et al. 2023). One
program takes one key head, a few of a row's queries with all query heads that share this key head, and one split of the
row's tokens. A second kernel combines the splits. Splits begin at fixed positions of the row and are combined in order,
so a row's result does not depend on the other rows of the call. `selfspec.kernels.reference.attend` is the reference
implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.checks import check_attend
from selfspec.kernels.layout import MOST_NODES, Layout

SPLIT = 256  # tokens of a row per program
SHORT = 32  # rows with more new tokens (prompts) have enough queries to fill a device without splitting
MAX_TILE_ROWS = 64


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
) -> Tensor:
    """Causal attention of every new token over its row; nodes of a tree attend to their ancestors only.

    Returns `[N, heads, head_dim]`, with zeros for padding.

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
        tile_rows: rows of a tile of queries, a power of two of at least 16; None: chosen by the call's shape. The order
            of summation may depend on it.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_attend`.
    """
    check_attend(queries, keys, values, layout, sinks)
    count, heads, dim = queries.shape
    page_size, kv_heads = keys.shape[1], keys.shape[2]
    share = heads // kv_heads
    rows = tile_rows or tile_rows_for(share, layout.most_new, queries.element_size())
    block_d = max(16, triton.next_power_of_2(dim))
    split = layout.most_new <= SHORT
    splits = triton.cdiv(layout.most_tokens, SPLIT) if split else 1
    blocks = triton.cdiv(layout.most_new, rows // share)
    out = (queries.new_empty if split else queries.new_zeros)((count, heads, dim))
    partial = queries.new_empty((splits, count, heads, dim), dtype=torch.float32) if split else out
    tops, totals = queries.new_empty((2, splits, count, heads), dtype=torch.float32) if split else (out, out)
    roots, nodes, ancestors = layout.trees or (None, None, None)
    _split[(layout.counts.shape[0] * blocks, kv_heads, splits)](
        queries, keys, values, partial, tops, totals, sinks,
        layout.starts, layout.counts, layout.lengths, layout.pages, layout.positions, roots, nodes, ancestors,
        scale, softcap or 0.0, window or 0, chunk or 0,
        queries.stride(0), queries.stride(1), layout.pages.stride(0), count, blocks,
        HEADS=heads, SHARE=share, DIM=dim, PAGE_SIZE=page_size, KV_HEADS=kv_heads,
        ROWS=rows, BLOCK_D=block_d, BLOCK_N=_keys_per_step(page_size, block_d, queries.element_size()),
        SPLIT=SPLIT if split else 0, NODES=0 if layout.trees is None else MOST_NODES, WINDOW=window is not None,
        CHUNK=chunk is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None and not split,
        UPCAST=triton.knobs.runtime.interpret, num_warps=8 if block_d * rows > 8192 else 4, num_stages=2,
    )  # fmt: skip
    if split:
        _combine[(count, heads)](
            partial, tops, totals, sinks, out, layout.rows, layout.lengths, count,
            HEADS=heads, DIM=dim, BLOCK_D=block_d, SPLIT=SPLIT, SINKS=sinks is not None, num_warps=1,
        )  # fmt: skip
    return out


def tile_rows_for(share: int, most_new: int, itemsize: int) -> int:
    """The rows of a tile, a power of two: the pairs of query and query head that read the same keys, 16 to 64.

    Float32 takes 16, since its products are computed in registers, not by tensor cores.
    """
    wanted = triton.next_power_of_2(share * min(most_new, MAX_TILE_ROWS))
    return int(max(16, triton.next_power_of_2(share), min(MAX_TILE_ROWS if itemsize < 4 else 16, wanted)))


def _keys_per_step(page_size: int, block_d: int, itemsize: int) -> int:
    """The keys per step: as many as registers and shared memory hold, and at most a page of 16, 32 or 64."""
    fits = 64 if block_d * itemsize <= 256 else 32 if block_d * itemsize <= 512 else 16
    return min(fits, page_size) if page_size in (16, 32, 64) else fits


@triton.jit(do_not_specialize=["window", "chunk", "num_tokens", "blocks"])
def _split(
    q_ptr, k_ptr, v_ptr, out_ptr, tops_ptr, totals_ptr, sinks_ptr,
    starts_ptr, counts_ptr, lengths_ptr, pages_ptr, positions_ptr, roots_ptr, nodes_ptr, ancestors_ptr,
    scale, softcap, window, chunk, q_token, q_head, pages_row, num_tokens, blocks,
    HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, NODES: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * (ROWS // SHARE)  # first query of this tile in its row
    kv_head, split = tl.program_id(1), tl.program_id(2)
    count, length = tl.load(counts_ptr + slot), tl.load(lengths_ptr + slot)
    if (first >= count) | (split * SPLIT >= length):
        return
    context = length - count  # tokens before the new ones
    start = tl.load(starts_ptr + slot)
    r = tl.arange(0, ROWS)
    query = first + r // SHARE
    token = (start + query).to(tl.int64)
    head = kv_head * SHARE + r % SHARE
    live = (r // SHARE < ROWS // SHARE) & (query < count)
    d = tl.arange(0, BLOCK_D)
    q_mask = live[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + token[:, None] * q_token + (head * q_head)[:, None] + d[None, :], mask=q_mask, other=0.0)
    position = context + query
    root = length
    seen_by = tl.zeros((ROWS,), tl.int64)
    if NODES > 0:
        root = tl.load(roots_ptr + slot)
        position = tl.load(positions_ptr + token, mask=live, other=0).to(tl.int32)
        seen_by = tl.load(ancestors_ptr + token, mask=live, other=0)
    low, high = _key_range(
        context + first, ROWS // SHARE, length, root, split, window, chunk, BLOCK_N, SPLIT, NODES, WINDOW, CHUNK
    )
    if UPCAST:
        q = q.to(tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for base in range(low, high, BLOCK_N):
        kv = base + tl.arange(0, BLOCK_N)
        there = kv < high
        place = _places(pages_ptr + slot * pages_row, base, kv, there, PAGE_SIZE, BLOCK_N)
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
        seen = _seen(kv, there, position, root, seen_by, nodes_ptr, slot, window, chunk, NODES, WINDOW, CHUNK)
        score = tl.where(seen, score * 1.4426950408889634, float("-inf"))
        top, total, acc = _added(score, v, top, total, acc)
    if SPLIT > 0:
        line = (split * num_tokens + token) * HEADS + head
        tl.store(tops_ptr + line, top, mask=live)
        tl.store(totals_ptr + line, total, mask=live)
        tl.store(out_ptr + line[:, None] * DIM + d[None, :], acc, mask=q_mask)
    else:
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            acc = acc * tl.exp2(top - higher)[:, None]
            total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
        out = acc / tl.where(live, total, 1.0)[:, None]
        line = token * HEADS + head
        tl.store(out_ptr + line[:, None] * DIM + d[None, :], out.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["window", "chunk"])
def _key_range(
    at, queries, length, root, split, window, chunk,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, NODES: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The tokens [low, high) of this split that queries from `at` on may attend to; `low` is a multiple of a step."""
    high = length if NODES > 0 else tl.minimum(at + queries, length)
    lowest = tl.minimum(root, at)
    low = 0
    if WINDOW:
        low = tl.maximum(low, lowest - window + 1)
    if CHUNK:
        low = tl.maximum(low, lowest // chunk * chunk)
    low = low // BLOCK_N * BLOCK_N
    if SPLIT > 0:
        low = tl.maximum(low, split * SPLIT)
        high = tl.minimum(high, split * SPLIT + SPLIT)
    return low, high


@triton.jit
def _places(table_ptr, base, kv, there, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The places in the cache of the tokens `kv` of a row, from `base` on; one table entry if they share a page."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table_ptr + base // PAGE_SIZE).to(tl.int64)
    else:
        page = tl.load(table_ptr + kv // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    return page * PAGE_SIZE + kv % PAGE_SIZE


@triton.jit(do_not_specialize=["window", "chunk"])
def _seen(
    kv, there, position, root, seen_by, nodes_ptr, slot, window, chunk,
    NODES: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Which tokens `kv` each query attends to: those up to itself; in trees, those before the root and ancestors."""
    key_at = kv[None, :]
    seen = there[None, :] & (key_at <= position[:, None])
    if NODES > 0:
        node = tl.minimum(tl.maximum(kv - root, 0), NODES - 1)
        inside = there & (kv >= root)
        bit = (seen_by[:, None] >> node[None, :].to(tl.int64)) & 1
        seen = tl.where(inside[None, :], bit != 0, seen)
        if WINDOW or CHUNK:
            key_at = tl.where(inside, tl.load(nodes_ptr + slot * NODES + node, mask=inside, other=0), kv)[None, :]
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


@triton.jit(do_not_specialize=["num_tokens"])
def _combine(
    partial_ptr, tops_ptr, totals_ptr, sinks_ptr, out_ptr, rows_ptr, lengths_ptr, num_tokens,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + token)
    d = tl.arange(0, BLOCK_D)
    out_at = (token.to(tl.int64) * HEADS + head) * DIM + d
    if row < 0:
        tl.store(out_ptr + out_at, tl.zeros((BLOCK_D,), out_ptr.dtype.element_ty), mask=d < DIM)
        return
    splits = (tl.load(lengths_ptr + row) + SPLIT - 1) // SPLIT
    here = token.to(tl.int64) * HEADS + head
    top = float("-inf")
    if SINKS:
        top = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
    sink = top
    for split in range(0, splits):
        top = tl.maximum(top, tl.load(tops_ptr + split * num_tokens * HEADS + here))
    total = 0.0
    if SINKS:
        total = tl.exp2(sink - top)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(0, splits):
        line = split * num_tokens * HEADS + here
        weight = tl.exp2(tl.load(tops_ptr + line) - top)
        total += weight * tl.load(totals_ptr + line)
        acc += weight * tl.load(partial_ptr + line * DIM + d, mask=d < DIM, other=0.0)
    tl.store(out_ptr + out_at, (acc / total).to(out_ptr.dtype.element_ty), mask=d < DIM)
