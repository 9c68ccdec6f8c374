"""How attention over pages is divided among programs: tiles of queries, splits of a row's tokens; their combination.

The number of splits follows from the shape of a call, which is known when a recording is made. Their size follows, on
the device, from the tokens that a tile of queries can see, so that a recording for many tokens divides short rows, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.layout import Layout

MAX_TILE_ROWS = 64
STEP = 64  # a split holds a multiple of the keys of a step, which are at most so many
PER_PROCESSOR = 2  # programs that a multiprocessor is to hold at once
MOST_BUFFERS = 3  # steps whose keys and values are in shared memory: one in use, two on their way
LONGEST = 2048  # tokens of a split in decoding; a longer row of a ragged batch would keep the others waiting
WORTH = (
    6  # bytes of keys and values that a split reads for each that it adds: queries, partial results written and read
)


class Device(NamedTuple):
    """What sizes of launches depend on; by default that of an H100 or H200."""

    processors: int = 132  # multiprocessors
    shared_bytes: int = 228 << 10  # of shared memory, per multiprocessor
    cache_bytes: int = 50 << 20  # of the L2 cache


class Tiling(NamedTuple):
    """The sizes of a call's programs."""

    rows: int  # of a tile: pairs of a query and a query head that read the same keys
    queries: int  # of a tile
    blocks: int  # tiles of a row at most
    tiles: int  # of all slots, for each key head
    block_d: int  # a head's numbers, rounded up to a power of two
    block_n: int  # keys per step
    splits: SplitPlan
    options: dict[str, int]  # of the launch


class SplitPlan(NamedTuple):
    """The splits of a call. A tile that sees T tokens has max(min(T // least, parts), T / longest) of them."""

    most: int  # splits of a tile that sees as many tokens as any can: the size of the grid
    parts: int  # splits of a tile that fill the device
    least: int  # tokens of a split that are worth its partial results
    longest: int  # tokens


def tiling_of(
    queries: Tensor, keys: Tensor, layout: Layout, window: int | None, chunk: int | None,
    tile_rows: int | None = None, split: int | None = None, device: Device | None = None,
) -> Tiling:  # fmt: skip
    """The tiling of a call, whose arguments are those of `paged_attention.attend`; None: chosen by the call's shape."""
    (_, heads, dim), (_, page_size, kv_heads, _) = queries.shape, keys.shape
    device, itemsize, share = device or device_of(queries), queries.element_size(), heads // kv_heads
    rows = tile_rows or tile_rows_for(share, layout.most_new, itemsize)
    per_tile = rows // share
    blocks = triton.cdiv(layout.most_new, per_tile)
    tiles = layout.counts.shape[0] * blocks
    tokens = tokens_seen(layout, per_tile, window, chunk)
    if split is None:
        used = min(layout.most_new, per_tile) * share
        plan = plan_splits(tiles * kv_heads, blocks, used, tokens, dim, itemsize, device.processors)
    else:
        plan = fixed_splits(tokens, split, window is not None or chunk is not None)
    block_d = max(16, triton.next_power_of_2(dim))
    block_n = keys_per_step(page_size if split is None else STEP, block_d, itemsize)  # sums of fixed splits: any pages
    options = launch_options(rows, block_d, block_n, itemsize, device)
    return Tiling(rows, per_tile, blocks, tiles, block_d, block_n, plan, options)


def tile_rows_for(share: int, most_new: int, itemsize: int) -> int:
    """The rows of a tile, a power of two: the pairs of query and query head that read the same keys, 16 to 64.

    Float32 takes 16, since its products are computed in registers, not by tensor cores.
    """
    wanted = triton.next_power_of_2(share * min(most_new, MAX_TILE_ROWS))
    return int(max(16, triton.next_power_of_2(share), min(MAX_TILE_ROWS if itemsize < 4 else 16, wanted)))


def keys_per_step(page_size: int, block_d: int, itemsize: int) -> int:
    """The keys per step: as many as registers and shared memory hold, and at most a page of 16, 32 or 64."""
    fits = STEP if block_d * itemsize <= 256 else 32 if block_d * itemsize <= 512 else 16
    return min(fits, page_size) if page_size in (16, 32, 64) else fits


def tokens_seen(layout: Layout, queries: int, window: int | None, chunk: int | None) -> int:
    """An upper bound of the tokens that a tile of so many queries reads."""
    limits = [limit + STEP + queries for limit in (window, chunk) if limit is not None]
    return min(layout.most_tokens, *limits, 1 << 30)


def plan_splits(
    programs: int, blocks: int, rows: int, tokens: int, dim: int, itemsize: int, processors: int
) -> SplitPlan:
    """As many splits as fill a device once, of no fewer tokens than their partial results are worth.

    Where that would leave multiprocessors without a program, splits are shorter: time is then latency, not bytes.

    Args:
        programs: tiles of the call, for all key heads.
        blocks: tiles of a row at most.
        rows: rows of a tile that hold a query at most.
        tokens: tokens that a tile sees at most.
        dim: of a head.
        itemsize: bytes of a number of keys and values.
        processors: multiprocessors of the device.
    """
    added = rows * (2 * (4 * dim + 8) + dim * itemsize)
    worth = WORTH * added // (2 * dim * itemsize)
    least = max(STEP, min(worth, tokens * programs // processors))
    parts = max(1, PER_PROCESSOR * processors // programs)
    longest = LONGEST if blocks == 1 else tokens  # a prompt has tiles enough, and its partial results would be large
    return SplitPlan(max(min(tokens // least, parts), triton.cdiv(tokens, longest)), parts, least, longest)


def fixed_splits(tokens: int, size: int, is_reach_limited: bool) -> SplitPlan:
    """Splits of `size` tokens that begin at multiples of it; a limited reach may begin within one."""
    return SplitPlan(triton.cdiv(tokens, size) + is_reach_limited, 1, size, size)


def device_of(tensor: Tensor) -> Device:
    """The tensor's device; the default for the CPU, where kernels are interpreted or compiled ahead of time."""
    if not tensor.is_cuda:
        return Device()
    found = torch.cuda.get_device_properties(tensor.device)
    return Device(found.multi_processor_count, found.shared_memory_per_multiprocessor, found.L2_cache_size)


def launch_options(rows: int, block_d: int, block_n: int, itemsize: int, device: Device) -> dict[str, int]:
    """Warps, stages and registers of a program.

    A warp's registers hold its part of a tile's sums: with more than 8,192 of them, four warps would spill, and eight
    take the registers of a multiprocessor. The keys
    and values of as many steps are requested ahead as leave shared memory for two programs: two steps of 32 KiB for
    each of them are more than the 30 KiB that a multiprocessor of an H200 must have on their way (4.8 TB/s, 0.8 us).
    """
    warps = 8 if block_d * rows > 8192 else 4
    tile = rows * block_d * (3 if rows < 64 else 6)  # from 64 rows on, results pass through shared memory, too
    free = device.shared_bytes // (PER_PROCESSOR if warps == 4 else 1) - 1024 - tile
    buffers = max(1, min(MOST_BUFFERS, free // (2 * block_n * block_d * itemsize)))
    options = {"num_warps": warps, "num_stages": 1 + buffers}
    # Without a bound, the assembler may spill to make registers suffice for more programs than memory does.
    return options | {"maxnreg": 255} if itemsize < 4 and torch.version.hip is None else options


@triton.jit
def tile_splits(
    at, queries, length, window, chunk, parts, least, longest,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What queries from position `at` on read: tokens [low, high), where splits begin, their size and their number.

    `low` and the beginnings of splits are multiples of a step; with `SPLIT`, of that.
    """
    high = tl.minimum(at + queries, length)
    low = 0
    if WINDOW:
        low = tl.maximum(low, at - window + 1)
    if CHUNK:
        low = tl.maximum(low, at // chunk * chunk)
    low = low // BLOCK_N * BLOCK_N
    if SPLIT > 0:
        begin = low // SPLIT * SPLIT
        size = SPLIT
    else:
        begin = low
        seen = high - low
        wanted = tl.maximum(tl.minimum(seen // least, parts), tl.cdiv(seen, longest))
        size = tl.cdiv(tl.cdiv(seen, tl.maximum(wanted, 1)), BLOCK_N) * BLOCK_N
    return low, high, begin, size, tl.cdiv(high - begin, size)


@triton.jit(do_not_specialize=["window", "chunk", "num_tokens", "parts", "least", "longest"])
def _combine(
    partial_ptr, tops_ptr, totals_ptr, sinks_ptr, out_ptr,
    rows_ptr, starts_ptr, counts_ptr, lengths_ptr, window, chunk, parts, least, longest, num_tokens,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, QUERIES: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_S: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SINKS: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of one token's head, in blocks of splits that begin at fixed ones."""
    token, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + token)
    if row < 0:
        return
    count, length = tl.load(counts_ptr + row), tl.load(lengths_ptr + row)
    query = (token - tl.load(starts_ptr + row)) // QUERIES * QUERIES  # the first of its tile
    _low, _high, begin, _size, splits = tile_splits(
        length - count + query, QUERIES, length, window, chunk, parts, least, longest,
        BLOCK_N, SPLIT, WINDOW, CHUNK,
    )  # fmt: skip
    if DIRECT & (splits == 1):
        return
    d = tl.arange(0, BLOCK_D)
    here = token.to(tl.int64) * HEADS + head
    top = float("-inf")
    total = 0.0
    if SINKS:
        top = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total = 1.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    before = begin // SPLIT if SPLIT > 0 else 0  # splits of the row before those of this tile
    for base in range(before // BLOCK_S * BLOCK_S, before + splits, BLOCK_S):
        split = base + tl.arange(0, BLOCK_S) - before
        there = (split >= 0) & (split < splits)
        line = split.to(tl.int64) * num_tokens * HEADS + here
        mask = there[:, None] & (d < DIM)[None, :]
        part = tl.load(partial_ptr + line[:, None] * DIM + d[None, :], mask=mask, other=0.0)
        tops = tl.load(tops_ptr + line, mask=there, other=float("-inf"))
        totals = tl.load(totals_ptr + line, mask=there, other=0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(tops - safe)
        fade = tl.exp2(top - safe)
        total = total * fade + tl.sum(weight * totals, 0)
        acc = acc * fade + tl.sum(weight[:, None] * part, 0)
        top = higher
    tl.store(out_ptr + here * DIM + d, (acc / total).to(out_ptr.dtype.element_ty), mask=d < DIM)
