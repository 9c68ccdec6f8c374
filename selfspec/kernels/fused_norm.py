"""Residual addition and RMS norm in one launch (Triton). `layer_reference.add_norm` is the reference implementation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.checks import check_add_norm
from selfspec.kernels.layout import Norm

ELEMENTS = 512  # elements of a row per warp


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
            branch = scaled_by_norm(branch, mean, weight, post_eps, post_offset, kind, POST_TWICE)
        x = rounded(x + branch, kind)
        tl.store(added_ptr + line, x.to(kind), mask=inside)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(x * x, 0) / SIZE
        x = scaled_by_norm(x, mean, weight, eps, offset, kind, TWICE)
        tl.store(normed_ptr + line, x.to(kind), mask=inside)


@triton.jit
def scaled_by_norm(x, mean, weight, eps, offset, kind: tl.constexpr, TWICE: tl.constexpr):
    """`x` over the root of its mean square `mean`, times a weight; in float32, rounded to `kind` once or twice."""
    x = x * tl.rsqrt(mean + eps)
    if TWICE:
        return rounded(rounded(x, kind) * weight, kind)
    return rounded(x * (offset + weight), kind)


@triton.jit
def rounded(x, kind: tl.constexpr):
    """Float32 numbers rounded to a dtype, to the nearest, in float32."""
    return x.to(kind).to(tl.float32)
