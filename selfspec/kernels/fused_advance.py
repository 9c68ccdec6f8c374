"""The next round's rows on the device (Triton). `reference.advance` is the reference implementation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.checks import check_advance
from selfspec.kernels.layout import CONTENT, LAST, ROOM


def advance(state: Tensor, num_kept: Tensor, ended: Tensor, last: Tensor) -> None:
    """Advance every row by the tokens that it kept; a row that ended becomes an empty slot.

    Args:
        state: int64 `[S, C]`, updated in place. Of its columns, `layout.LAST`, `layout.CONTENT` and `layout.ROOM` hold
            the row's last token, its number of tokens (0: an empty slot), and the tokens that it may still emit.
        num_kept, ended, last: the fields of `Accepted`, `[S]`.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_advance`.
    """
    check_advance(state, num_kept, ended, last)
    slots = state.shape[0]
    block = triton.next_power_of_2(slots)
    _advance[(1,)](
        state, num_kept, ended, last, slots, state.stride(0), LAST=LAST, CONTENT=CONTENT, ROOM=ROOM, BLOCK=block,
        num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "state_row"])
def _advance(
    state_ptr, kept_ptr, ended_ptr, last_ptr, slots, state_row,
    LAST: tl.constexpr, CONTENT: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.arange(0, BLOCK)
    real = slot < slots
    row = state_ptr + slot.to(tl.int64) * state_row
    kept = tl.load(kept_ptr + slot, mask=real, other=0).to(tl.int64)
    goes_on = tl.load(ended_ptr + slot, mask=real, other=0) == 0
    content = tl.load(row + CONTENT, mask=real, other=0)
    room = tl.load(row + ROOM, mask=real, other=0)
    tl.store(row + LAST, tl.load(last_ptr + slot, mask=real, other=0), mask=real)
    tl.store(row + CONTENT, tl.where(goes_on, content + kept, 0), mask=real)
    tl.store(row + ROOM, tl.where(goes_on, room - kept, 0), mask=real)
