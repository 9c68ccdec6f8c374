"""Reads a weight into the device's cache ahead of its product (Triton). `reference.prefetch` does nothing instead."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.attention_splits import device_of
from selfspec.kernels.checks import check_prefetch

LINE = 128  # bytes that one instruction asks for
BLOCK = 512  # lines per program
SHARE = 2  # the part of the cache that a weight may fill is one in so many


def prefetch(weight: Tensor) -> None:
    """Ask for the first lines of a weight, as many as half of the device's L2 cache holds; no number is changed.

    The launch ends before they have come.

    Raises:
        ValueError: the weight is not contiguous; see `checks.check_prefetch`.
    """
    check_prefetch(weight)
    lines = min(weight.nbytes, device_of(weight).cache_bytes // SHARE) // LINE
    if lines:
        _prefetch[(triton.cdiv(lines, BLOCK),)](
            weight, lines, NUMBERS=LINE // weight.element_size(), BLOCK=BLOCK, num_warps=4
        )


@triton.jit(do_not_specialize=["lines"])
def _prefetch(weight_ptr, lines, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    line = tl.minimum(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), lines - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight_ptr + line.to(tl.int64) * NUMBERS],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
