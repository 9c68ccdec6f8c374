"""Kernels of fused layers, a launch each (Triton): addition and norm; rotation and KV write; the gate of an MLP.

`selfspec.kernels.reference` has the reference implementations, of the same names.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.checks import check_add_norm, check_gate, check_rotate
from selfspec.kernels.layout import Layout, Norm, Rotation

ELEMENTS = 512  # elements of a row per warp
GATE_BLOCK = 1024  # elements per program of the gate


def add_norm(
    hidden: Tensor, branch: Tensor | None, norm: Norm | None, post: Norm | None = None
) -> tuple[Tensor, Tensor | None]:
    """Add a branch to the residual stream, and norm the sum.

    Rounding is that of the model's modules. The sum is rounded to the dtype. A norm without an offset (Llama) is
    rounded before and after the product with the weight, a norm with an offset (Gemma) once, after the product.

    Args:
        hidden: the residual stream, `[N, size]`, in float32, bfloat16 or float16.
        branch: the output of attention or MLP, `[N, size]`; None: nothing is added.
        norm: the norm of the sum; None: the sum only.
        post: a norm of the branch before the addition.

    Returns:
        The sum, `[N, size]` (`hidden` itself without a branch), and the normed sum, `[N, size]` (None without a norm).

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_add_norm`.
    """
    check_add_norm(hidden, branch, norm, post)
    count, size = hidden.shape
    added = hidden if branch is None else hidden.new_empty(hidden.shape)
    normed = None if norm is None else hidden.new_empty(hidden.shape)
    if count == 0 or (branch is None and norm is None):
        return added, normed
    block = triton.next_power_of_2(size)
    eps, offset = norm[1:] if norm else (0.0, 0.0)
    post_eps, post_offset = post[1:] if post else (0.0, 0.0)
    _add_norm[(count,)](
        hidden, branch, norm and norm.weight, post and post.weight, None if branch is None else added, normed,
        eps, post_eps, offset, post_offset,
        SIZE=size, BLOCK=block, TWICE=offset == 0.0, POST_TWICE=post_offset == 0.0,
        num_warps=min(16, max(1, block // ELEMENTS)),
    )  # fmt: skip
    return added, normed


@triton.jit
def _add_norm(
    hidden_ptr, branch_ptr, weight_ptr, post_ptr, added_ptr, normed_ptr, eps, post_eps, offset, post_offset,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TWICE: tl.constexpr, POST_TWICE: tl.constexpr,
):  # fmt: skip
    kind = hidden_ptr.dtype.element_ty
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    line = tl.program_id(0).to(tl.int64) * SIZE + at
    x = tl.load(hidden_ptr + line, mask=inside, other=0.0).to(tl.float32)
    if branch_ptr is not None:
        branch = tl.load(branch_ptr + line, mask=inside, other=0.0).to(tl.float32)
        if post_ptr is not None:
            weight = tl.load(post_ptr + at, mask=inside, other=0.0).to(tl.float32)
            mean = tl.sum(branch * branch, 0) / SIZE
            branch = _scaled_by_norm(branch, mean, weight, post_eps, post_offset, kind, POST_TWICE)
        x = _rounded(x + branch, kind)
        tl.store(added_ptr + line, x.to(kind), mask=inside)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(x * x, 0) / SIZE
        x = _scaled_by_norm(x, mean, weight, eps, offset, kind, TWICE)
        tl.store(normed_ptr + line, x.to(kind), mask=inside)


@triton.jit
def _scaled_by_norm(x, mean, weight, eps, offset, kind: tl.constexpr, TWICE: tl.constexpr):
    """`x` over the root of its mean square `mean`, times a weight; in float32, rounded to `kind` once or twice."""
    x = x * tl.rsqrt(mean + eps)
    if TWICE:
        return _rounded(_rounded(x, kind) * weight, kind)
    return _rounded(x * (offset + weight), kind)


@triton.jit
def _rounded(x, kind: tl.constexpr):
    """Float32 numbers rounded to a dtype, to the nearest, in float32."""
    return x.to(kind).to(tl.float32)


def rotate(qkv: Tensor, keys: Tensor, values: Tensor, layout: Layout, rotation: Rotation) -> Tensor:
    """Rotate the queries and keys of N tokens, and write keys and values to the cache.

    Rounding is that of the model's modules: each product with cos or sin is rounded to the dtype, and so is their sum.

    Args:
        qkv: `[N, (heads + 2 * kv_heads) * head_dim]`, each token's queries, then keys, then values, in float32,
            bfloat16 or float16.
        keys: pages of keys, `[pages, page_size, kv_heads, head_dim]`.
        values: pages of values, of the same shape.
        layout: of the call. Its `slots` and `positions` are read, the latter as lines of the tables.
        rotation: in the dtype of `qkv`.

    Returns:
        The rotated queries, `[N, heads, head_dim]`.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_rotate`.
    """
    check_rotate(qkv, keys, values, layout, rotation)
    count, (kv_heads, dim) = len(qkv), keys.shape[2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    queries = qkv.new_empty((count, heads, dim))
    if count == 0:
        return queries
    block = triton.next_power_of_2(dim // 2)
    cos, sin, q_norm, k_norm = rotation
    _rotate[(count, heads + 2 * kv_heads)](
        qkv, queries, keys, values, layout.slots, layout.positions, cos, sin,
        q_norm and q_norm.weight, k_norm and k_norm.weight, qkv.stride(0), rotation.eps, rotation.offset,
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK=block, TWICE=rotation.offset == 0.0, num_warps=1,
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
            a = _scaled_by_norm(a, mean, first.to(tl.float32), eps, offset, kind, TWICE)
            b = _scaled_by_norm(b, mean, second.to(tl.float32), eps, offset, kind, TWICE)
        line = tl.load(positions_ptr + token) * HALF + at
        cos = tl.load(cos_ptr + line, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + line, mask=inside, other=0.0).to(tl.float32)
        low = _rounded(a * cos, kind) - _rounded(b * sin, kind)
        b = _rounded(_rounded(b * cos, kind) + _rounded(a * sin, kind), kind)
        a = _rounded(low, kind)
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


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """The activation of each token's first half times its second half, `[N, inner]`.

    Both the activation and the product are rounded to the dtype, as in the model's modules.

    Args:
        gate_up: `[N, 2 * inner]`, in float32, bfloat16 or float16.
        activation: "silu" or "gelu_tanh".

    Raises:
        ValueError: an argument has the wrong dtype, shape or layout, or another activation; see `checks.check_gate`.
    """
    check_gate(gate_up, activation)
    count, inner = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((count, inner))
    if count and inner:
        block = min(GATE_BLOCK, triton.next_power_of_2(inner))
        _gate[(count, triton.cdiv(inner, block))](
            gate_up, out, gate_up.stride(0), inner,
            BLOCK=block, SILU=activation == "silu", num_warps=max(1, block // 256),
        )  # fmt: skip
    return out


@triton.jit
def _gate(gate_up_ptr, out_ptr, gate_up_token, inner, BLOCK: tl.constexpr, SILU: tl.constexpr):
    kind = gate_up_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    source = gate_up_ptr + token * gate_up_token + at
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=inside, other=0.0).to(tl.float32)
    rise = x
    if not SILU:  # x * (1 + tanh(y)) / 2 = x / (1 + exp(-2 y)), which loses no digits where tanh is near -1
        rise = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    x = _rounded(x / (1.0 + tl.exp(tl.minimum(-rise, 80.0))), kind)  # the bound keeps exp finite
    tl.store(out_ptr + token * inner + at, _rounded(x * up, kind).to(kind), mask=inside)
