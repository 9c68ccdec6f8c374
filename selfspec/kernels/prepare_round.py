"""The calls of a round, from the state of its rows, in one launch (Triton).

`selfspec.kernels.reference.prepare` is the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels import layout as columns
from selfspec.kernels.checks import check_prepare
from selfspec.kernels.layout import Layout, Prepared, SamplingTensors, Step

ALIGNED = 4  # slots: tensors of them begin at multiples of 16 bytes, for which kernels are compiled once


def prepare(
    state: Tensor, pages: Tensor, page_size: int, width: int, most_tokens: int, has_drafts: bool = False
) -> Prepared:
    """Where a round's tokens lie, and how they are picked.

    A row drafts min(drafts, remaining - 1) tokens, so that there is room for the target's own one. Place p of a slot is
    used if the row drafts at least p tokens.

    Args:
        state: int64 `[S, C]`, the rows by the columns of `kernels.layout`; those without content are empty slots.
        pages: int32 `[S, P]`, pages of the rows.
        page_size: tokens of a page.
        width: W, places of a slot.
        most_tokens: upper bound of the tokens that a row then holds.
        has_drafts: make the calls of draft steps, too.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_prepare`.
    """
    check_prepare(state, pages, width)
    slots, device = state.shape[0], state.device
    padded = -(-slots // ALIGNED) * ALIGNED
    orders, count = 1 + has_drafts, width * padded
    ints = torch.empty((orders, 2, count), dtype=torch.int32, device=device)  # owners, top_k
    longs = torch.empty((orders, 4, count), dtype=torch.int64, device=device)  # slots, positions, targets, seeds
    floats = torch.empty((orders, 3, count), dtype=torch.float32, device=device)
    rows = torch.empty((3, padded), dtype=torch.int32, device=device)  # starts, counts, lengths
    steps = torch.empty((3, width if has_drafts else 0, padded), dtype=torch.int32, device=device)
    fed = torch.empty(slots * width, dtype=torch.int64, device=device)
    _prepare[(slots,)](
        state, pages, ints, longs, floats, rows, steps, fed, state.stride(0), pages.stride(0), padded,
        PAGE_SIZE=page_size, WIDTH=width, BLOCK=triton.next_power_of_2(width), DRAFTS=has_drafts,
        LAST_AT=columns.LAST, CONTENT_AT=columns.CONTENT, REMAINING_AT=columns.REMAINING, DRAFTS_AT=columns.DRAFTS,
        SEED_AT=columns.SEED, TOP_K_AT=columns.TOP_K, FLOATS_AT=columns.TEMPERATURE, GIVEN_AT=columns.GIVEN,
        num_warps=1,
    )  # fmt: skip

    def step(order: int, at: slice, starts: Tensor, counts: Tensor, lengths: Tensor, most_new: int) -> Step:
        owners, top_k = ints[order, :, at]
        places, positions, targets, seeds = longs[order, :, at]
        temperature, top_p, min_p = floats[order, :, at]
        layout = Layout(starts, counts, lengths, pages, owners, places, positions, most_new, most_tokens)
        return Step(layout, SamplingTensors(temperature, top_k, top_p, min_p, seeds, targets))

    starts, counts, lengths = rows[:, :slots].unbind()
    drafts = []
    for at in range(width if has_drafts else 0):
        own = slice(at * padded, at * padded + slots)
        drafts.append(step(1, own, steps[0, at, :slots], steps[1, at, :slots], steps[2, at, :slots], 1))
    return Prepared(fed, step(0, slice(slots * width), starts, counts, lengths, width), drafts)


@triton.jit
def _store(
    ints_ptr, longs_ptr, floats_ptr, at, count, there, owner, top_k, place, position, target, seed, floats_at,
):  # fmt: skip
    """Store the fields of places at indices `at` of buffers with `count` each."""
    tl.store(ints_ptr + at, owner, mask=there)
    tl.store(ints_ptr + count + at, top_k, mask=there)
    tl.store(longs_ptr + at, place, mask=there)
    tl.store(longs_ptr + count + at, position, mask=there)
    tl.store(longs_ptr + 2 * count + at, target, mask=there)
    tl.store(longs_ptr + 3 * count + at, seed, mask=there)
    for i in tl.static_range(3):
        number = tl.load(floats_at + i).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(floats_ptr + i * count + at, number, mask=there)


@triton.jit(do_not_specialize=["state_row", "pages_row", "padded"])
def _prepare(
    state_ptr, pages_ptr, ints_ptr, longs_ptr, floats_ptr, rows_ptr, steps_ptr, fed_ptr, state_row, pages_row, padded,
    PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DRAFTS: tl.constexpr,
    LAST_AT: tl.constexpr, CONTENT_AT: tl.constexpr, REMAINING_AT: tl.constexpr, DRAFTS_AT: tl.constexpr,
    SEED_AT: tl.constexpr, TOP_K_AT: tl.constexpr, FLOATS_AT: tl.constexpr, GIVEN_AT: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    row = state_ptr + slot.to(tl.int64) * state_row
    content, remaining = tl.load(row + CONTENT_AT), tl.load(row + REMAINING_AT)
    drafts = tl.minimum(tl.load(row + DRAFTS_AT), remaining - 1)
    place = tl.arange(0, BLOCK)
    there = place < WIDTH
    used = there & (content > 0) & (place <= tl.maximum(drafts, 0))
    new = tl.sum(used.to(tl.int32), 0)
    position = tl.where(used, content - 1 + place, 0)
    page = tl.load(pages_ptr + slot.to(tl.int64) * pages_row + position // PAGE_SIZE, mask=used, other=0).to(tl.int64)
    kept = tl.where(used, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    owner = tl.where(used, slot, -1)
    top_k = tl.load(row + TOP_K_AT).to(tl.int32) + tl.zeros((BLOCK,), tl.int32)
    seed = tl.load(row + SEED_AT) + tl.zeros((BLOCK,), tl.int64)
    target = content + place.to(tl.int64)
    count = padded * WIDTH
    floats_at = row + FLOATS_AT
    at = slot * WIDTH + place
    _store(ints_ptr, longs_ptr, floats_ptr, at, count, there, owner, top_k, kept, position, target, seed, floats_at)
    tl.store(rows_ptr + slot, slot * WIDTH)
    tl.store(rows_ptr + padded + slot, new)
    tl.store(rows_ptr + 2 * padded + slot, tl.where(new > 0, content - 1 + new, 0).to(tl.int32))
    given = tl.load(row + GIVEN_AT - 1 + place, mask=there & (place > 0), other=0)
    tl.store(fed_ptr + at, tl.where(place == 0, tl.load(row + LAST_AT), given), mask=there)
    if DRAFTS:
        at = place * padded + slot
        _store(
            ints_ptr + 2 * count, longs_ptr + 4 * count, floats_ptr + 3 * count, at, count, there,
            owner, top_k, kept, position, target, seed, floats_at,
        )  # fmt: skip
        tl.store(steps_ptr + at, slot + tl.zeros((BLOCK,), tl.int32), mask=there)
        tl.store(steps_ptr + count + at, used.to(tl.int32), mask=there)
        tl.store(steps_ptr + 2 * count + at, tl.where(used, content + place, 0).to(tl.int32), mask=there)
