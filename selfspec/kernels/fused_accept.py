"""Acceptance of every row's draft on the device (Triton). `reference.accept` is the reference implementation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.checks import check_accept
from selfspec.kernels.layout import Accepted


def accept(
    fed: Tensor,
    picks: Tensor,
    starts: Tensor,
    counts: Tensor,
    room: Tensor,
    eos: Tensor,
    most_new: int,
    sums: Tensor | None = None,
) -> Accepted:
    """Accept the longest prefix of each draft that equals the target's picks, and the target's next pick.

    The result is cut where the row ends.

    Args:
        fed: int64 `[N]`, the tokens fed: each row's last token, then its drafted ones.
        picks: int64 `[N]`, the target's pick after each of them.
        starts: int32 `[S]`, where each row's tokens begin among the N.
        counts: int32 `[S]`, drafted tokens + 1; 0: an empty slot.
        room: int32 `[S]`, tokens that the row may still emit.
        eos: int64 `[S, E]`, tokens that end each row; -1 in unused entries.
        most_new: maximum of `counts`.
        sums: int64 `[2, >= most_new]`, updated in place: by draft position, the numbers of verified and of accepted
            tokens are added.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_accept`.
    """
    check_accept(fed, picks, starts, counts, room, eos, most_new, sums)
    slots, device = counts.shape[0], counts.device
    made = torch.empty((3, slots), dtype=torch.int32, device=device)
    last = torch.empty(slots, dtype=torch.int64, device=device)
    record = torch.empty((slots, 3 + 2 * most_new), dtype=torch.int64, device=device)
    _accept[(slots,)](
        fed, picks, starts, counts, room, eos, sums, made, last, record,
        slots, 0 if sums is None else sums.stride(0), eos.stride(0), most_new,
        EOS=eos.shape[1], BLOCK=triton.next_power_of_2(most_new), SUMS=sums is not None, num_warps=1,
    )  # fmt: skip
    return Accepted(made[0], made[1], made[2], last, record)


@triton.jit(do_not_specialize=["slots", "sums_row", "eos_row", "most_new"])
def _accept(
    fed_ptr, picks_ptr, starts_ptr, counts_ptr, room_ptr, eos_ptr, sums_ptr, made_ptr, last_ptr, record_ptr,
    slots, sums_row, eos_row, most_new, EOS: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    count, start = tl.load(counts_ptr + slot), tl.load(starts_ptr + slot)
    room = tl.load(room_ptr + slot)
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
    kept = tl.minimum(tl.minimum(block, end + 1), room)
    ended = tl.where(kept == end + 1, 1, tl.where(kept == room, 2, 0))
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
    if SUMS:  # tokens after the row's end do not count as verified
        right = tl.minimum(accepted, kept)
        tried = tl.where(kept < accepted, kept, drafted)
        judged = tl.minimum(right + 1, tried)
        one = tl.full((BLOCK,), 1, tl.int64)
        tl.atomic_add(sums_ptr + place, one, mask=place < judged)
        tl.atomic_add(sums_ptr + sums_row + place, one, mask=place < right)
