"""Acceptance of every row's draft, and the rows of the next round, on the device (Triton).

`selfspec.kernels.reference` has the reference implementations, of the same names.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.checks import check_accept, check_advance
from selfspec.kernels.layout import CONTENT, LAST, REMAINING, Accepted


def accept(
    fed: Tensor,
    picks: Tensor,
    starts: Tensor,
    counts: Tensor,
    remaining: Tensor,
    eos: Tensor,
    most_new: int,
) -> Accepted:
    """Accept the longest prefix of each draft that equals the target's picks, and the target's next pick.

    The result is cut where the row ends.

    Args:
        fed: int64 `[N]`, the tokens fed: each row's last token, then its drafted ones.
        picks: int64 `[N]`, the target's pick after each of them.
        starts: int32 `[S]`, where each row's tokens begin among the N.
        counts: int32 `[S]`, drafted tokens + 1; 0: an empty slot.
        remaining: int32 `[S]`, tokens that the row may still emit.
        eos: int64 `[S, E]`, tokens that end each row; -1 in unused entries.
        most_new: maximum of `counts`.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_accept`.
    """
    check_accept(fed, picks, starts, counts, remaining, eos)
    slots, device = counts.shape[0], counts.device
    made = torch.empty((3, slots), dtype=torch.int32, device=device)
    last = torch.empty(slots, dtype=torch.int64, device=device)
    record = torch.empty((slots, 3 + 2 * most_new), dtype=torch.int64, device=device)
    _accept[(slots,)](
        fed, picks, starts, counts, remaining, eos, made, last, record, slots, eos.stride(0), most_new,
        EOS=eos.shape[1], BLOCK=triton.next_power_of_2(most_new), num_warps=1,
    )  # fmt: skip
    return Accepted(made[0], made[1], made[2], last, record)


@triton.jit(do_not_specialize=["slots", "eos_row", "most_new"])
def _accept(
    fed_ptr, picks_ptr, starts_ptr, counts_ptr, remaining_ptr, eos_ptr, made_ptr, last_ptr, record_ptr,
    slots, eos_row, most_new, EOS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    count, start = tl.load(counts_ptr + slot), tl.load(starts_ptr + slot)
    remaining = tl.load(remaining_ptr + slot)
    place = tl.arange(0, BLOCK)
    drafted = tl.maximum(count - 1, 0)
    guess = tl.load(fed_ptr + start + 1 + place, mask=place < drafted, other=-1)
    own = tl.load(picks_ptr + start + place, mask=place < count, other=-1)
    wrong = (place < drafted) & (guess != own)
    accepted = tl.min(tl.where(wrong, place, drafted), 0)
    ends = place < 0
    for i in tl.static_range(EOS):
        ends = ends | (own == tl.load(eos_ptr + slot * eos_row + i))
    end = tl.min(tl.where(ends & (place <= accepted) & (place < count), place, BLOCK), 0)
    block = tl.where(count > 0, accepted + 1, 0)
    kept = tl.minimum(tl.minimum(block, end + 1), remaining)
    ended = tl.where(kept == end + 1, 1, tl.where(kept == remaining, 2, 0))
    ended = tl.where(count > 0, ended, 0)
    tl.store(made_ptr + slot, accepted)
    tl.store(made_ptr + slots + slot, kept)
    tl.store(made_ptr + 2 * slots + slot, ended)
    tl.store(last_ptr + slot, tl.sum(tl.where(place == kept - 1, own, 0), 0))
    record = record_ptr + slot.to(tl.int64) * (3 + 2 * most_new)
    tl.store(record, drafted.to(tl.int64))
    tl.store(record + 1, accepted.to(tl.int64))
    tl.store(record + 2, kept.to(tl.int64))
    tl.store(record + 3 + place, guess, mask=place < most_new)
    tl.store(record + 3 + most_new + place, own, mask=place < most_new)


def advance(state: Tensor, num_kept: Tensor, ended: Tensor, last: Tensor) -> None:
    """Advance every row by the tokens that it kept; a row that ended becomes an empty slot.

    Args:
        state: int64 `[S, C]`, updated in place. Its columns `layout.LAST`, `layout.CONTENT` and `layout.REMAINING` hold
            the row's last token, its number of tokens (0: an empty slot), and the tokens that it may still emit.
        num_kept, ended, last: the fields of `Accepted`, `[S]`.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_advance`.
    """
    check_advance(state, num_kept, ended, last)
    slots = state.shape[0]
    block = triton.next_power_of_2(slots)
    _advance[(1,)](
        state, num_kept, ended, last, slots, state.stride(0),
        LAST=LAST, CONTENT=CONTENT, REMAINING=REMAINING, BLOCK=block, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "state_row"])
def _advance(
    state_ptr, kept_ptr, ended_ptr, last_ptr, slots, state_row,
    LAST: tl.constexpr, CONTENT: tl.constexpr, REMAINING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.arange(0, BLOCK)
    real = slot < slots
    row = state_ptr + slot.to(tl.int64) * state_row
    kept = tl.load(kept_ptr + slot, mask=real, other=0).to(tl.int64)
    goes_on = tl.load(ended_ptr + slot, mask=real, other=0) == 0
    content = tl.load(row + CONTENT, mask=real, other=0)
    remaining = tl.load(row + REMAINING, mask=real, other=0)
    tl.store(row + LAST, tl.load(last_ptr + slot, mask=real, other=0), mask=real)
    tl.store(row + CONTENT, tl.where(goes_on, content + kept, 0), mask=real)
    tl.store(row + REMAINING, tl.where(goes_on, remaining - kept, 0), mask=real)
