"""Acceptance of every row's draft, which turns the rows into those of the next round, on the device (Triton).

`selfspec.kernels.reference.accept` is the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels import layout as columns
from selfspec.kernels.checks import check_accept
from selfspec.kernels.layout import Accepted


def accept(state: Tensor, fed: Tensor, picks: Tensor, starts: Tensor, counts: Tensor, most_new: int) -> Accepted:
    """Accept the longest prefix of each draft that equals the target's picks, and the target's next pick.

    The result is cut where the row ends. A row advances by the tokens that it kept; one that ended becomes an empty
    slot.

    Args:
        state: int64 `[S, C]`, the rows by the columns of `kernels.layout`; the first three are updated.
        fed: int64 `[N]`, the tokens fed: each row's last token, then its drafted ones.
        picks: int64 `[N]`, the target's pick after each of them.
        starts: int32 `[S]`, where each row's tokens begin among the N.
        counts: int32 `[S]`, drafted tokens + 1; 0: an empty slot.
        most_new: maximum of `counts`.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_accept`.
    """
    check_accept(state, fed, picks, starts, counts)
    slots, device = state.shape[0], state.device
    num_kept = torch.empty(slots, dtype=torch.int32, device=device)
    record = torch.empty((slots, 3 + 2 * most_new), dtype=torch.int64, device=device)
    _accept[(slots,)](
        state, fed, picks, starts, counts, num_kept, record, state.stride(0), most_new,
        LAST=columns.LAST, CONTENT=columns.CONTENT, REMAINING=columns.REMAINING, EOS=columns.EOS,
        NUM_EOS=columns.MOST_EOS, BLOCK=triton.next_power_of_2(most_new), num_warps=1,
    )  # fmt: skip
    return Accepted(num_kept, record)


@triton.jit(do_not_specialize=["state_row", "most_new"])
def _accept(
    state_ptr, fed_ptr, picks_ptr, starts_ptr, counts_ptr, kept_ptr, record_ptr, state_row, most_new,
    LAST: tl.constexpr, CONTENT: tl.constexpr, REMAINING: tl.constexpr, EOS: tl.constexpr, NUM_EOS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    row = state_ptr + slot.to(tl.int64) * state_row
    count, start = tl.load(counts_ptr + slot), tl.load(starts_ptr + slot)
    content, remaining = tl.load(row + CONTENT), tl.load(row + REMAINING)
    place = tl.arange(0, BLOCK)
    drafted = tl.maximum(count - 1, 0)
    guess = tl.load(fed_ptr + start + 1 + place, mask=place < drafted, other=-1)
    own = tl.load(picks_ptr + start + place, mask=place < count, other=-1)
    wrong = (place < drafted) & (guess != own)
    accepted = tl.min(tl.where(wrong, place, drafted), 0)
    ends = place < 0
    for i in tl.static_range(NUM_EOS):
        ends = ends | (own == tl.load(row + EOS + i))
    end = tl.min(tl.where(ends & (place <= accepted) & (place < count), place, BLOCK), 0)
    block = tl.where(count > 0, accepted + 1, 0)
    kept = tl.minimum(tl.minimum(block, end + 1).to(tl.int64), remaining)
    goes_on = (count == 0) | ((kept != end + 1) & (kept != remaining))
    tl.store(row + LAST, tl.sum(tl.where(place == kept - 1, own, 0), 0))
    tl.store(row + CONTENT, tl.where(goes_on, content + kept, 0))
    tl.store(row + REMAINING, tl.where(goes_on, remaining - kept, 0))
    tl.store(kept_ptr + slot, kept.to(tl.int32))
    record = record_ptr + slot.to(tl.int64) * (3 + 2 * most_new)
    tl.store(record, drafted.to(tl.int64))
    tl.store(record + 1, accepted.to(tl.int64))
    tl.store(record + 2, kept)
    tl.store(record + 3 + place, guess, mask=place < most_new)
    tl.store(record + 3 + most_new + place, own, mask=place < most_new)
