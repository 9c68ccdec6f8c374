"""Norms of queries and keys, rotary embedding, and the write to KV pages in one launch (Triton).

`layer_reference.rotate` is the reference implementation.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.checks import check_rotate
from selfspec.kernels.fused_norm import rounded, scaled_by_norm
from selfspec.kernels.layout import Norm


def rotate(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> Tensor:
    """Rotate the queries and keys of N tokens, and write keys and values to the cache.

    Rounding is that of the model's modules: each product with cos or sin is rounded to the dtype, and so is their sum.

    Args:
        qkv: `[N, (heads + 2 * kv_heads) * head_dim]`, each token's queries, then keys, then values, in float32,
            bfloat16 or float16.
        keys: pages of keys, `[pages, page_size, kv_heads, head_dim]`.
        values: pages of values, of the same shape.
        slots: int64 `[N]`, page * page_size + offset of each token; nothing is written for tokens with a negative slot.
        positions: int64 `[N]`, the line of each token in the tables.
        cos: `[positions, head_dim / 2]`, in the dtype of `qkv`.
        sin: of the same shape.
        q_norm: a norm of each query head before the rotation, with a weight `[head_dim]`.
        k_norm: a norm of each key head; both norms are given or none, with equal eps and offset.

    Returns:
        The rotated queries, `[N, heads, head_dim]`.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_rotate`.
    """
    check_rotate(qkv, keys, values, slots, positions, cos, sin, q_norm, k_norm)
    count, (kv_heads, dim) = len(qkv), keys.shape[2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    queries = qkv.new_empty((count, heads, dim))
    if count == 0:
        return queries
    block = triton.next_power_of_2(dim // 2)
    eps, offset = q_norm[1:] if q_norm else (0.0, 0.0)
    _rotate[(count, heads + 2 * kv_heads)](
        qkv, queries, keys, values, slots, positions, cos, sin, q_norm and q_norm.weight, k_norm and k_norm.weight,
        qkv.stride(0), eps, offset,
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK=block, TWICE=offset == 0.0, num_warps=1,
    )  # fmt: skip
    return queries


@triton.jit
def _rotate(
    qkv_ptr, queries_ptr, keys_ptr, values_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    qkv_token, eps, offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    kind = qkv_ptr.dtype.element_ty
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    source = qkv_ptr + token * qkv_token + head * (2 * HALF) + at
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if q_norm_ptr is not None:
            q, k = inside & (head < HEADS), inside & (head >= HEADS)
            first = tl.load(q_norm_ptr + at, mask=q, other=0.0) + tl.load(k_norm_ptr + at, mask=k, other=0.0)
            second = tl.load(q_norm_ptr + HALF + at, mask=q, other=0.0)
            second += tl.load(k_norm_ptr + HALF + at, mask=k, other=0.0)
            mean = (tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF)
            a = scaled_by_norm(a, mean, first.to(tl.float32), eps, offset, kind, TWICE)
            b = scaled_by_norm(b, mean, second.to(tl.float32), eps, offset, kind, TWICE)
        line = tl.load(positions_ptr + token) * HALF + at
        cos = tl.load(cos_ptr + line, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + line, mask=inside, other=0.0).to(tl.float32)
        low = rounded(a * cos, kind) - rounded(b * sin, kind)
        b = rounded(rounded(b * cos, kind) + rounded(a * sin, kind), kind)
        a = rounded(low, kind)
    if head < HEADS:
        out = queries_ptr + (token * HEADS + head) * (2 * HALF) + at
        tl.store(out, a.to(kind), mask=inside)
        tl.store(out + HALF, b.to(kind), mask=inside)
        return
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    if head < HEADS + KV_HEADS:
        place = (slot * KV_HEADS + head - HEADS) * (2 * HALF) + at
        tl.store(keys_ptr + place, a.to(kind), mask=inside)
        tl.store(keys_ptr + place + HALF, b.to(kind), mask=inside)
    else:
        place = (slot * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF) + at
        tl.store(values_ptr + place, a.to(kind), mask=inside)
        tl.store(values_ptr + place + HALF, b.to(kind), mask=inside)
