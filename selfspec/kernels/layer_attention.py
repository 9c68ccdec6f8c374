"""The attention of a layer in one launch (Triton): rotation, KV write, attention over pages, combination of splits.

Programs are those of `selfspec.kernels.paged_attention` with tiles and splits of constant sizes, so that a token's bits
depend on its query and its row's keys and values alone. A program rotates its own queries. It rotates and writes the
new keys of its split that its queries see before it reads any: programs of several tiles write the same numbers to the
same places. Of a tile's programs, the last one to finish, found by a counter, combines the results of all splits in
their order, and sets the counter back. `selfspec.kernels.reference.rotate_attend` is the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.attention_splits import tile_splits, tiling_of
from selfspec.kernels.checks import check_rotate_attend
from selfspec.kernels.layout import LEAST_TILE, SPLIT, Layout, Rotation
from selfspec.kernels.paged_attention import _over_pages, _zero_padding
from selfspec.kernels.skinny_products import _tree_sum

NEW = 16  # new tokens that are rotated at once


def rotate_attend(
    qkv: Tensor, keys: Tensor, values: Tensor, layout: Layout, rotation: Rotation, scale: float, counters: Tensor,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Rotate the queries and keys of N tokens, write keys and values to the cache, and attend over each token's row.

    Rounding is that of `fused_layer.rotate` and `paged_attention.attend`.

    Args:
        qkv, keys, values, rotation: see `fused_layer.rotate`; norms have no offset.
        layout: the rows of the call; the positions of a row's new tokens are the last ones that it holds.
        scale: factor of the scores.
        counters: int32, zeros, one for each slot, each of its `most_new` tokens and each key head at least; zeros again
            when the launch ends.
        window: attend to the last `window` positions only.

    Returns:
        `[N, heads, head_dim]`, with zeros for padding.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_rotate_attend`.
    """
    check_rotate_attend(qkv, keys, values, layout, rotation, counters)
    (count, width), (_, page_size, kv_heads, dim) = qkv.shape, keys.shape
    heads = width // dim - 2 * kv_heads
    out = qkv.new_empty((count, heads, dim))
    if count == 0:
        return out
    share = heads // kv_heads
    rows = max(LEAST_TILE, int(triton.next_power_of_2(share)))
    tiling = tiling_of(out, keys, layout, window, None, rows, SPLIT)
    most = tiling.splits.most
    partial = qkv.new_empty((most, count, heads, dim), dtype=torch.float32)
    tops, totals = qkv.new_empty((2, most, count, heads), dtype=torch.float32)
    cos, sin, q_norm, k_norm = rotation
    _rotate_attend[(tiling.tiles + 1, kv_heads, most)](
        qkv, keys, values, out, partial, tops, totals, counters, cos, sin,
        q_norm and q_norm.weight, k_norm and k_norm.weight,
        layout.starts, layout.counts, layout.lengths, layout.pages, layout.rows, layout.slots,
        scale, rotation.eps, window or 0, count, qkv.stride(0), layout.pages.stride(0), tiling.blocks,
        HEADS=heads, SHARE=share, DIM=dim, PAGE_SIZE=page_size, KV_HEADS=kv_heads, ROWS=tiling.rows,
        QUERIES=tiling.queries, BLOCK_D=tiling.block_d, LEVELS=tiling.block_d.bit_length() - 1, BLOCK_N=tiling.block_n,
        SPLIT=SPLIT, NEW=NEW, WINDOW=window is not None, UPCAST=triton.knobs.runtime.interpret,
        **tiling.options, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["window", "num_tokens", "blocks"])
def _rotate_attend(
    qkv_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, tops_ptr, totals_ptr, counters_ptr, cos_ptr, sin_ptr,
    q_norm_ptr, k_norm_ptr, starts_ptr, counts_ptr, lengths_ptr, pages_ptr, rows_ptr, slots_ptr,
    scale, eps, window, num_tokens, qkv_token, pages_row, blocks,
    HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_D: tl.constexpr, LEVELS: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, NEW: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    if tile == tl.num_programs(0) - 1:  # after the tiles: the padding
        if split == 0:
            _zero_padding(out_ptr, rows_ptr, num_tokens, kv_head, r, d, HEADS, SHARE, DIM, ROWS, BLOCK_D)
        return
    slot = tile // blocks
    first = (tile % blocks) * QUERIES  # first query of this tile in its row
    count, length = tl.load(counts_ptr + slot), tl.load(lengths_ptr + slot)
    if first >= count:
        return
    context = length - count  # tokens before the new ones
    low, high, begin, size, splits = tile_splits(
        context + first, QUERIES, length, window, 0, 1, SPLIT, SPLIT, BLOCK_N, SPLIT, WINDOW, False
    )
    if split >= splits:
        return
    low = tl.maximum(low, begin + split * size)
    high = tl.minimum(high, begin + split * size + size)
    start = tl.load(starts_ptr + slot)
    _write_new(
        qkv_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_norm_ptr, slots_ptr, eps, qkv_token, kv_head, start, context,
        tl.maximum(low, context), high, HEADS, KV_HEADS, DIM, BLOCK_D, LEVELS, NEW,
    )  # fmt: skip
    query = first + r // SHARE
    token = (start + query).to(tl.int64)
    head = kv_head * SHARE + r % SHARE
    live = (r // SHARE < QUERIES) & (query < count)
    position = context + query
    line = qkv_ptr + token * qkv_token + head * DIM
    q = _rotated(line, live, position, cos_ptr, sin_ptr, q_norm_ptr, eps, ROWS, DIM, BLOCK_D, LEVELS)
    tl.debug_barrier()  # what this program has written is read by other threads of it
    top, total, acc = _over_pages(
        q, k_ptr, v_ptr, pages_ptr + slot * pages_row, low, high, position, kv_head, scale, 0.0, window, 0,
        DIM, PAGE_SIZE, KV_HEADS, ROWS, BLOCK_D, BLOCK_N, WINDOW, False, False, UPCAST,
    )  # fmt: skip
    mask = live[:, None] & (d < DIM)[None, :]
    here, is_last = token * HEADS + head, split == split
    if splits > 1:
        at_part = split * num_tokens * HEADS + here
        tl.store(tops_ptr + at_part, top, mask=live)
        tl.store(totals_ptr + at_part, total, mask=live)
        tl.store(partial_ptr + at_part[:, None] * DIM + d[None, :], acc, mask=mask)
        tl.debug_barrier()  # all threads have written before one counts
        counter = counters_ptr + tile * KV_HEADS + kv_head
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(counter, 0)
            total, acc = _combined(
                partial_ptr, tops_ptr, totals_ptr, here, splits, num_tokens * HEADS, live, ROWS, DIM, BLOCK_D
            )
    out = acc / tl.where(total == 0, 1.0, total)[:, None]  # a split may see nothing
    tl.store(out_ptr + here[:, None] * DIM + d[None, :], out.to(out_ptr.dtype.element_ty), mask=mask & is_last)


@triton.jit
def _write_new(
    qkv_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_norm_ptr, slots_ptr, eps, qkv_token, kv_head, start, context, low, high,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, LEVELS: tl.constexpr,
    NEW: tl.constexpr,
):  # fmt: skip
    """Rotate and write the new keys of a row's tokens [low, high), of which none are before `context`; and values."""
    d = tl.arange(0, BLOCK_D)
    for base in range(low, high, NEW):
        kv = base + tl.arange(0, NEW)
        token = start + kv - context
        place = tl.load(slots_ptr + token, mask=kv < high, other=-1)
        fresh = place >= 0
        line = qkv_ptr + token.to(tl.int64) * qkv_token + (HEADS + kv_head) * DIM
        key = _rotated(line, fresh, kv, cos_ptr, sin_ptr, k_norm_ptr, eps, NEW, DIM, BLOCK_D, LEVELS)
        mask = fresh[:, None] & (d < DIM)[None, :]
        value = tl.load((line + KV_HEADS * DIM)[:, None] + d[None, :], mask=mask, other=0.0)
        at = ((place * KV_HEADS + kv_head) * DIM)[:, None] + d[None, :]
        tl.store(k_ptr + at, key, mask=mask)
        tl.store(v_ptr + at, value, mask=mask)


@triton.jit
def _combined(
    partial_ptr, tops_ptr, totals_ptr, here, splits, stride, live,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sums of weights and weighted values of all splits, in their order, which other programs have written."""
    d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (d < DIM)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for split in tl.range(0, splits, loop_unroll_factor=4):
        at = split * stride + here
        part = tl.load(partial_ptr + at[:, None] * DIM + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        tops = tl.load(tops_ptr + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(totals_ptr + at, mask=live, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tops)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight, fade = tl.exp2(tops - safe), tl.exp2(top - safe)
        total = total * fade + weight * totals
        acc = acc * fade[:, None] + weight[:, None] * part
        top = higher
    return total, acc


@triton.jit
def _rotated(
    line, live, position, cos_ptr, sin_ptr, norm_ptr, eps,
    LINES: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Heads `[LINES, BLOCK_D]` at the addresses `line`, normed where there is a norm, and rotated by their positions.

    Rounded as by the model's modules: the norm before and after the product with its weight, each product with cos or
    sin, and their sum.
    """
    HALF: tl.constexpr = DIM // 2
    kind = line.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    other = tl.where(d < HALF, d + HALF, d - HALF)  # of each number, the one that it is rotated with
    inside = d < DIM
    mask = live[:, None] & inside[None, :]
    x = tl.load(line[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(line[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        root = tl.rsqrt(_tree_sum(x * x, LINES, BLOCK_D, LEVELS) / DIM + eps)[:, None]
        x_weight = tl.load(norm_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        y_weight = tl.load(norm_ptr + other, mask=inside, other=0.0).to(tl.float32)[None, :]
        x = ((x * root).to(kind).to(tl.float32) * x_weight).to(kind).to(tl.float32)
        y = ((y * root).to(kind).to(tl.float32) * y_weight).to(kind).to(tl.float32)
    angle = position.to(tl.int64)[:, None] * HALF + (d % HALF)[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0).to(tl.float32)
    turned = (y * sin).to(kind).to(tl.float32)
    x = (x * cos).to(kind).to(tl.float32)
    return tl.where((d < HALF)[None, :], x - turned, x + turned).to(kind)
