"""The activation of a gated MLP in one launch (Triton). `layer_reference.gate` is the reference implementation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.checks import check_gate
from selfspec.kernels.fused_norm import rounded

BLOCK = 1024  # elements per program


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
        block = min(BLOCK, triton.next_power_of_2(inner))
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
    x = rounded(x / (1.0 + tl.exp(tl.minimum(-rise, 80.0))), kind)  # the bound keeps exp finite
    tl.store(out_ptr + token * inner + at, rounded(x * up, kind).to(kind), mask=inside)
