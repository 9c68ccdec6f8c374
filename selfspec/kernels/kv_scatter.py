"""Writes new keys and values to KV pages (Triton). `reference.scatter` is the reference implementation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.checks import check_scatter


def scatter(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write the keys and values of N tokens to the cache.

    Args:
        key: `[N, kv_heads, head_dim]`.
        value: `[N, kv_heads, head_dim]`.
        keys: pages of keys, `[pages, page_size, kv_heads, head_dim]`.
        values: pages of values, of the same shape.
        slots: int64 `[N]`, page * page_size + offset of each token; tokens with a negative slot are skipped.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_scatter`.
    """
    check_scatter(key, value, keys, values, slots)
    count, heads, dim = key.shape
    if count == 0:
        return
    width = triton.next_power_of_2(heads * dim)
    _scatter[(count,)](
        key, value, keys, values, slots, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        DIM=dim, WIDTH=heads * dim, BLOCK=width, num_warps=min(8, max(1, width // 256)),
    )  # fmt: skip


@triton.jit
def _scatter(
    key_ptr, value_ptr, keys_ptr, values_ptr, slots_ptr, key_token, key_head, value_token, value_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    head, d = at // DIM, at % DIM
    token = token.to(tl.int64)
    key = tl.load(key_ptr + token * key_token + head * key_head + d, mask=inside)
    value = tl.load(value_ptr + token * value_token + head * value_head + d, mask=inside)
    tl.store(keys_ptr + slot * WIDTH + at, key, mask=inside)
    tl.store(values_ptr + slot * WIDTH + at, value, mask=inside)
