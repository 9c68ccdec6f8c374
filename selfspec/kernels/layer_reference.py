"""Reference implementations of the kernels of a fused layer in torch; see `selfspec.kernels.reference`.

Rounding to the dtype happens after every operation, as in transformers' modules.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.kernels import reference
from selfspec.kernels.checks import check_add_norm, check_gate, check_rotate
from selfspec.kernels.layout import Norm


def add_norm(
    hidden: Tensor, branch: Tensor | None, norm: Norm | None, post: Norm | None = None
) -> tuple[Tensor, Tensor | None]:
    """The reference of `selfspec.kernels.fused_norm.add_norm`."""
    check_add_norm(hidden, branch, norm, post)
    if branch is not None:
        hidden = hidden + (branch if post is None else _normed(branch, post))
    return hidden, None if norm is None else _normed(hidden, norm)


def _normed(x: Tensor, norm: Norm) -> Tensor:
    high = x.float()
    high = high * torch.rsqrt(high.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.offset:
        return (high * (norm.offset + norm.weight.float())).to(x.dtype)
    return norm.weight * high.to(x.dtype)


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
    """The reference of `selfspec.kernels.fused_rotary.rotate`."""
    check_rotate(qkv, keys, values, slots, positions, cos, sin, q_norm, k_norm)
    kv_heads, dim = keys.shape[2:]
    lines = qkv.unflatten(1, (-1, dim))
    queries, key, value = lines.split([lines.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        queries, key = _normed(queries, q_norm), _normed(key, k_norm)
    angles = cos[positions][:, None], sin[positions][:, None]
    reference.scatter(_rotated(key, *angles), value, keys, values, slots)
    return _rotated(queries, *angles)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """The reference of `selfspec.kernels.fused_gate.gate`."""
    check_gate(gate_up, activation)
    x, up = gate_up.chunk(2, -1)
    return (F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")) * up
