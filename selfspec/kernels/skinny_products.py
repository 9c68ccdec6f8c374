"""Products of up to 64 rows with a weight, with what stands before and after them in a layer (Triton).

With a weight read once, time is that of reading it. Every program takes 32 outputs, and all rows. The sum of an output
is in one order whatever the number of rows: blocks of inputs from the first to the last, by the same instruction of
tensor cores. So a row's result does not depend, by a single bit, on the other rows of the call.

A norm before a product needs the mean square of its row. What adds to the residual stream leaves the sum of the squares
of every 32 numbers; these few sums are added, as a tree of one shape, by every program that norms.

`selfspec.kernels.reference` has the reference implementations, of the same names.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, float32

from selfspec.kernels.attention_splits import Device, device_of
from selfspec.kernels.checks import SQUARED, check_gate_product, check_norm_product, check_product_add, check_squares
from selfspec.kernels.layout import Norm

OUTPUTS = SQUARED  # of a program: with fewer than 64, all row counts are multiplied by the same instruction
INPUTS = {2: 128, 4: 32}  # of a step, by bytes of a number; float32 is multiplied in registers
MOST_BUFFERS = 7  # steps whose weights are in shared memory or on their way there
PER_PROCESSOR = {16: 4, 32: 3, 64: 2}  # programs for whose registers a multiprocessor has room, by rows of a tile


def norm_product(hidden: Tensor, squares: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Norm rows, and multiply them with a weight, `[N, out]`.

    Rounding is that of the model's modules: the normed rows are rounded before and after the product with the norm's
    weight, and the sums once, with the bias.

    Args:
        hidden: `[N, size]`, at most 64 rows, in float32, bfloat16 or float16.
        squares: float32 `[N, ceil(size / 32)]`, sums of squares of `hidden`, see `squares_of`.
        norm: without an offset.
        weight: `[out, size]`.
        bias: `[out]`.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_norm_product`.
    """
    check_norm_product(hidden, squares, norm, weight, bias)
    out = hidden.new_empty((len(hidden), len(weight)))
    _launch(hidden, weight, out, squares=squares, norm=norm, bias=bias)
    return out


def gate_product(hidden: Tensor, squares: Tensor, norm: Norm, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Norm rows, multiply them with two weights, and return the activation of the first result times the second.

    Both results, the activation and the product are rounded to the dtype, as in the model's modules.

    Args:
        hidden, squares, norm: see `norm_product`.
        gate, up: `[inner, size]`.
        activation: "silu" or "gelu_tanh".

    Returns:
        `[N, inner]`.

    Raises:
        ValueError: an argument has the wrong dtype, shape or layout, or another activation; see
            `checks.check_gate_product`.
    """
    check_gate_product(hidden, squares, norm, gate, up, activation)
    out = hidden.new_empty((len(hidden), len(gate)))
    _launch(hidden, gate, out, squares=squares, norm=norm, up=up, activation=activation)
    return out


def product_add(x: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply rows with a weight, and add the result, rounded to the dtype, to the residual stream.

    Args:
        x: `[N, in]`, at most 64 rows, in float32, bfloat16 or float16.
        weight: `[size, in]`.
        bias: `[size]`.
        hidden: the residual stream, `[N, size]`.

    Returns:
        The sum, `[N, size]`, rounded to the dtype; and sums of its squares, see `squares_of`.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_product_add`.
    """
    check_product_add(x, weight, bias, hidden)
    out, squares = hidden.new_empty(hidden.shape), _empty_squares(hidden)
    _launch(x, weight, out, bias=bias, hidden=hidden, sums=squares)
    return out, squares


def squares_of(hidden: Tensor) -> Tensor:
    """Sums of the squares of every 32 numbers of each row, float32 `[N, ceil(size / 32)]`, for rows `[N, size]`."""
    check_squares(hidden)
    squares = _empty_squares(hidden)
    _launch(hidden, hidden, None, hidden=hidden, sums=squares, size=0)
    return squares


def _empty_squares(hidden: Tensor) -> Tensor:
    return hidden.new_empty((len(hidden), triton.cdiv(hidden.shape[1], OUTPUTS)), dtype=float32)


def _launch(
    x: Tensor, weight: Tensor, out: Tensor | None, *,
    squares: Tensor | None = None, norm: Norm | None = None, up: Tensor | None = None, bias: Tensor | None = None,
    hidden: Tensor | None = None, sums: Tensor | None = None, activation: str = "", size: int | None = None,
) -> None:  # fmt: skip
    """One launch. `out`: None where only `sums` are stored. `size`: inputs of the product, where they are not those of
    `x`; with 0, `x` and `weight` are not read."""
    (count, inputs), outputs = x.shape, (weight if out is None else out).shape[1]
    if count == 0 or outputs == 0:
        return
    rows, parts = max(16, triton.next_power_of_2(count)), triton.cdiv(inputs, OUTPUTS) if norm else 1
    levels, eps = (parts - 1).bit_length(), norm.eps if norm else 0.0
    size = inputs if size is None else size
    programs = triton.cdiv(outputs, OUTPUTS)
    options = _options(rows, x.element_size(), 1 if up is None else 2, programs, device_of(x))
    _product[(programs,)](
        x, squares, norm and norm.weight, weight, up, bias, hidden, out, sums,
        count, size, outputs, x.stride(0), weight.stride(0), parts, eps,
        ROWS=rows, OUTPUTS=OUTPUTS, INPUTS=INPUTS[x.element_size()], PARTS=1 << levels, LEVELS=levels,
        SILU=activation == "silu", UPCAST=triton.knobs.runtime.interpret, **options,
    )  # fmt: skip


def _options(rows: int, itemsize: int, num_weights: int, programs: int, device: Device) -> dict[str, Any]:
    """Warps and stages: as many as leave shared memory for all programs at once. Products and sums are not contracted:
    which ones are may differ between row counts.

    A device reads at its full rate if each of its multiprocessors has some 32 KiB of weights on their way (4.1 TB/s,
    1 us).
    """
    line = INPUTS[itemsize] * itemsize
    per_processor = min(triton.cdiv(programs, device.processors), PER_PROCESSOR[rows])
    free = device.shared_bytes // per_processor - 1024 - rows * line  # normed rows pass through it, too
    buffers = min(MOST_BUFFERS, free // (line * (rows + OUTPUTS * num_weights)))
    return {"num_warps": 4 if itemsize < 4 else 8, "num_stages": 1 + max(1, buffers), "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["count"])
def _product(
    x_ptr, squares_ptr, norm_ptr, weight_ptr, up_ptr, bias_ptr, hidden_ptr, out_ptr, sums_ptr,
    count, size, outputs, x_row, weight_row, parts, eps,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr,
    SILU: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    kind = x_ptr.dtype.element_ty
    block = tl.program_id(0)
    row, place, at = tl.arange(0, ROWS), tl.arange(0, OUTPUTS), tl.arange(0, INPUTS)
    own = block * OUTPUTS + place
    there, inside = row < count, own < outputs
    first = block.to(tl.int64) * OUTPUTS * weight_row
    scale = tl.zeros((ROWS,), tl.float32)
    if norm_ptr is not None:
        part = tl.arange(0, PARTS)
        sums = tl.load(
            squares_ptr + row[:, None] * parts + part[None, :],
            mask=there[:, None] & (part < parts)[None, :], other=0.0,
        )  # fmt: skip
        scale = tl.rsqrt(_tree_sum(sums, ROWS, PARTS, LEVELS) / size + eps)
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    risen = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for base in range(0, size, INPUTS):
        k = base + at
        here = k < size
        mask = inside[:, None] & here[None, :]
        lines = place[:, None] * weight_row + k[None, :]
        weight = tl.load(weight_ptr + first + lines, mask=mask, other=0.0)
        x = tl.load(x_ptr + row[:, None] * x_row + k[None, :], mask=there[:, None] & here[None, :], other=0.0)
        if norm_ptr is not None:
            factor = tl.load(norm_ptr + k, mask=here, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * scale[:, None]).to(kind).to(tl.float32)
            x = (x * factor[None, :]).to(kind)
        acc = _added(weight, x, acc, UPCAST)
        if up_ptr is not None:
            risen = _added(tl.load(up_ptr + first + lines, mask=mask, other=0.0), x, risen, UPCAST)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + own, mask=inside, other=0.0).to(tl.float32)[:, None]
    result = tl.trans(acc).to(kind).to(tl.float32)  # [ROWS, OUTPUTS]
    if up_ptr is not None:
        rise = result
        if not SILU:  # see `fused_layer._gate`
            rise = 1.5957691216057308 * (result + 0.044715 * result * result * result)
        result = (result / (1.0 + tl.exp(tl.minimum(-rise, 80.0)))).to(kind).to(tl.float32)
        result = result * tl.trans(risen).to(kind).to(tl.float32)
    line = row.to(tl.int64)[:, None] * outputs + own[None, :]
    mask = there[:, None] & inside[None, :]
    if hidden_ptr is not None:
        result += tl.load(hidden_ptr + line, mask=mask, other=0.0).to(tl.float32)
    result = result.to(kind)
    if out_ptr is not None:
        tl.store(out_ptr + line, result, mask=mask)
    if sums_ptr is not None:
        high = tl.where(mask, result.to(tl.float32), 0.0)
        sums = _tree_sum(high * high, ROWS, OUTPUTS, 5)
        tl.store(sums_ptr + row * tl.num_programs(0) + block, sums, mask=there)


@triton.jit
def _added(weight, x, acc, UPCAST: tl.constexpr):
    """`acc` `[OUTPUTS, ROWS]` plus the product of weights `[OUTPUTS, INPUTS]` and rows `[ROWS, INPUTS]`."""
    if UPCAST:
        weight, x = weight.to(tl.float32), x.to(tl.float32)
    return tl.dot(weight, tl.trans(x), acc, input_precision="ieee")


@triton.jit
def _tree_sum(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """Sums `[ROWS]` of lines of `WIDTH` = 2 ** `LEVELS` numbers: of neighbours, then of neighbouring sums, and so on.

    Each addition is written out, so that the order depends on no layout of registers, as that of `tl.sum` does.
    """
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(x, (ROWS, WIDTH >> (level + 1), 2)))
        x = left + right
    return tl.reshape(x, (ROWS,))
