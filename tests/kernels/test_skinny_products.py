"""Products of few rows, in the interpreter: equal to their references, and bits that depend on no other row."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from selfspec.kernels import reference
from selfspec.kernels.layout import Norm

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter

from selfspec.kernels import skinny_products
from selfspec.kernels.skinny_products import gate_product, norm_product, product_add, squares_of

pytestmark = pytest.mark.usefixtures("rounds_to_nearest")
ARGUMENTS = list(inspect.signature(skinny_products._product.fn).parameters)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
COUNTS = (1, 2, 5, 32, 64)


def some(*shape, dtype, scale=1.0):
    return torch.randn(shape).mul(scale).to(dtype)


def normed(count, size, dtype):
    """Rows, sums of their squares, and a norm."""
    hidden = some(count, size, dtype=dtype)
    return hidden, squares_of(hidden), Norm(torch.randn(size).mul(0.1).add(1.0).to(dtype), 1e-5)


def agree(got, wanted, norms=1.0):
    """Equal up to one rounding of each number, and float32 sums in another order (1e-5 of a number of norm `norms`)."""
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[wanted.dtype]
    torch.testing.assert_close(got, wanted, rtol=rounding, atol=norms * (1e-5 if rounding == 1e-5 else rounding / 8))


SHAPES = [(3, 96, 40, False), (17, 200, 33, True), (1, 32, 64, True)]  # rows, inputs, outputs, bias


@each_dtype
@pytest.mark.parametrize(("count", "size", "outputs", "has_bias"), SHAPES)
def test_norm_and_product(count, size, outputs, has_bias, dtype):
    given = normed(count, size, dtype)
    weight = some(outputs, size, dtype=dtype, scale=size**-0.5)
    bias = some(outputs, dtype=dtype) if has_bias else None
    agree(norm_product(*given, weight, bias), reference.norm_product(*given, weight, bias))


@each_dtype
@pytest.mark.parametrize(("count", "activation"), [(3, "silu"), (18, "gelu_tanh")])
def test_norm_gate_and_up(count, activation, dtype):
    given = normed(count, 160, dtype)
    gate, up = some(2, 40, 160, dtype=dtype, scale=160**-0.5).unbind()
    wanted = reference.gate_product(*given, gate, up, activation)
    roundings = 4  # of gate, up, activation and product
    agree(gate_product(*given, gate, up, activation), wanted, roundings * float(wanted.float().abs().max()))


@each_dtype
@pytest.mark.parametrize(("count", "size", "outputs", "has_bias"), SHAPES)
def test_product_and_sum(count, size, outputs, has_bias, dtype):
    x, weight = some(count, size + 3, dtype=dtype)[:, 3:], some(outputs, size, dtype=dtype, scale=size**-0.5)
    bias, hidden = some(outputs, dtype=dtype) if has_bias else None, some(count, outputs, dtype=dtype)
    got, squares = product_add(x, weight, bias, hidden)
    wanted, _ = reference.product_add(x, weight, bias, hidden)
    agree(got, wanted, norms=8.0)  # of a sum near zero, one rounding of what is added
    torch.testing.assert_close(squares, reference.squares_of(got), rtol=1e-5, atol=1e-5)
    assert torch.equal(squares, squares_of(got)), "layers may begin at any hidden state"


def calls(dtype):
    """Each product of a layer, for rows of a slice; several steps over the inputs, the last one not full."""
    hidden, squares, norm = normed(64, 300, dtype)
    x, first, second = some(64, 290, dtype=dtype), *some(2, 40, 300, dtype=dtype).unbind()
    down, bias = some(300, 290, dtype=dtype), some(40, dtype=dtype)
    return {
        "norm_product": lambda at: norm_product(hidden[at], squares[at], norm, first, bias),
        "gate_product": lambda at: gate_product(hidden[at], squares[at], norm, first, second, "silu"),
        "product_add": lambda at: torch.cat(product_add(x[at], down, None, hidden[at]), 1),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["norm_product", "gate_product", "product_add"])
@pytest.mark.usefixtures("sums_in_order")
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(name, dtype):
    call = calls(dtype)[name]
    whole = call(slice(0, 64))
    for count in COUNTS:
        first = 64 - count
        assert torch.equal(call(slice(first, 64)), whole[first:]), f"{count} rows"


@pytest.mark.parametrize("count", [1, 40])
def test_weights_are_read_once(count, monkeypatch):
    """Counted address by address; rows and sums of squares, which all programs read, stay in the cache of a device."""
    weight, dtype = some(70, 290, dtype=torch.bfloat16), torch.bfloat16
    given, read = normed(count, 290, dtype), list[np.ndarray]()
    load = interpreter.InterpreterBuilder.create_masked_load

    def counted(self, pointers, mask, *rest):
        read.append(pointers.data[mask.data])
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counted)
    norm_product(*given, weight)
    addresses = np.concatenate([one.reshape(-1) for one in read]).astype(np.int64)
    own = addresses[(addresses >= weight.data_ptr()) & (addresses < weight.data_ptr() + weight.nbytes)]
    assert len(own) == len(np.unique(own)) == weight.numel()


class Launches:
    """In place of the kernel: the grids and arguments of its launches."""

    def __init__(self):
        self.made = []

    def __getitem__(self, grid):
        return lambda *args, **named: self.made.append((grid[0], dict(zip(ARGUMENTS, args, strict=False)) | named))


@pytest.mark.parametrize("rows", [1, 64])
def test_a_layer_of_8b_reads_its_weights_and_hardly_more(rows, monkeypatch):
    """Counted from grids and tiles: at most 1.05 of the weights, where rows are read once from memory."""
    size, inner, qkv, kind = 4096, 14336, 6144, {"dtype": torch.bfloat16, "device": "meta"}
    launches = Launches()
    monkeypatch.setattr(skinny_products, "_product", launches)
    hidden, norm = torch.empty(rows, size, **kind), Norm(torch.empty(size, **kind), 1e-5)
    squares = torch.empty(rows, size // 32, device="meta")
    shapes = (qkv, size), (2 * inner, size), (size, size), (size, inner)
    weights = [torch.empty(shape, **kind) for shape in shapes]
    norm_product(hidden, squares, norm, weights[0])
    product_add(hidden, weights[2], None, hidden)
    gate_product(hidden, squares, norm, *weights[1].chunk(2), "silu")
    product_add(torch.empty(rows, inner, **kind), weights[3], None, hidden)
    read = 0
    for programs, given in launches.made:
        steps = -(-given["size"] // given["INPUTS"])
        tiles = programs * steps * given["OUTPUTS"] * given["INPUTS"] * (2 if given["up_ptr"] is not None else 1)
        lines = (given["x_ptr"], given["squares_ptr"], given["hidden_ptr"], given["out_ptr"], given["sums_ptr"])
        read += 2 * tiles + sum(one.nbytes for one in lines if one is not None)
    assert len(launches.made) == 4
    assert 1 <= read / sum(one.nbytes for one in weights) <= 1.05


def test_no_rows_are_no_work_and_too_many_are_refused():
    hidden, squares, norm = normed(2, 64, torch.float32)
    none = norm_product(hidden[:0], squares[:0], norm, hidden)
    assert none.shape == (0, 2)
    many = torch.zeros(65, 64)
    for module in (skinny_products, reference):
        with pytest.raises(ValueError, match=r"squares_of: hidden must be \[N, size\] with at most 64 rows"):
            module.squares_of(many)
    with pytest.raises(ValueError, match=r"norm.offset must be 0, got 1"):
        norm_product(hidden, squares, norm._replace(offset=1.0), hidden)
