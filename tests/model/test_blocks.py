"""Weights in the blocks of GGUF files: products of full precision, and the bits of a row its own."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.executors.cpu.packed import Packed
from selfspec.kernels import compiled_call as c
from selfspec.kernels.dequantize import TYPES as KNOWN
from selfspec.kernels.dequantize import block_sizes, dequantized
from selfspec.kernels.large_pages import LargePageAllocator
from selfspec.kernels.rounding import rounded
from selfspec.model.gguf_blocks import Blocks, BlockWeight
from selfspec.model.llama_weights import Linear
from tests.model.test_packed import multiply

gguf = pytest.importorskip("gguf")
TYPES = sorted(KNOWN)
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}
HALVES |= {"Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108]}  # places of scales


def random_blocks(kind, outputs, inputs, seed=0):
    """Blocks of random bytes with scales of either sign, and the weights that they stand for, in float32."""
    rng = np.random.default_rng(seed)
    per_block, size = block_sizes(kind)
    data = rng.integers(0, 256, (outputs, inputs // per_block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = (rng.normal(size=data.shape[:2]) * 0.05).astype(np.float16)
        data[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
    data = data.reshape(outputs, -1)
    weight = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(data), torch.from_numpy(weight)


def linear(kind, outputs, inputs, seed=0, biased=False, digits=3):
    """The same outputs with a float weight, and with blocks."""
    data, weight = random_blocks(kind, outputs, inputs, seed)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(seed)) if biased else None
    return Linear(weight, bias), Linear(BlockWeight(Blocks(kind, data), digits), bias)


def tokens(rows, inputs, seed=1):
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed))
    x[:, inputs // 3] *= 300  # a large activation
    return x


def check(packed, x, parts, threads=1):
    """Check precision and bits of a product, and return it."""
    got = multiply(packed, x, threads)
    weight = torch.cat([part.weight for part in parts]).double()
    wanted = (rounded(x) if packed.struct.digits == 2 else x).double() @ weight.T
    # an activation of three bytes is rounded to a 2^23rd of the largest of its 32, and sums are float32
    largest = x.view(len(x), -1, 32).abs().amax(2).repeat_interleave(32, 1).double()
    sizes = largest @ weight.abs().T
    if parts[0].bias is not None:
        bias = torch.cat([part.bias for part in parts]).double()
        wanted, sizes = wanted + bias, sizes + bias.abs()
    assert ((got - wanted).abs() <= 4e-7 * sizes + 1e-30).all()
    assert torch.equal(got, torch.cat([multiply(packed, row) for row in x.split(1)]))
    return got


@pytest.mark.parametrize("kind", sorted(HALVES))
def test_dequantised_weights_are_those_of_the_package_gguf(kind):
    data, weight = random_blocks(kind, 5, 3 * block_sizes(kind)[0])
    assert torch.equal(dequantized(data, kind), weight)


@pytest.mark.parametrize("digits", [2, 3])
@pytest.mark.parametrize("kind", TYPES)
@given(
    outputs=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    blocks=st.integers(1, 3),
    rows=st.integers(1, 17),
    threads=st.integers(1, 3),
    biased=st.booleans(),
)
def test_products_are_those_of_the_files_weights_and_a_rows_bits_its_own(
    kind, digits, outputs, blocks, rows, threads, biased
):
    inputs = blocks * block_sizes(kind)[0]
    parts, in_blocks = zip(
        *[linear(kind, size, inputs, seed, biased, digits) for seed, size in enumerate(outputs)], strict=True
    )
    packed = Packed(in_blocks, LargePageAllocator())
    assert packed.struct.kind == c.BLOCKS[kind]
    check(packed, tokens(rows, inputs), parts, threads)


@pytest.mark.parametrize("digits", [2, 3])
@pytest.mark.parametrize("kinds", [("Q5_0", "Q5_0", "Q8_0"), ("Q4_1", "Q4_0", "Q8_0")])
def test_the_parts_of_a_product_may_be_of_different_types(kinds, digits):
    made = [linear(kind, 64, 96, seed, biased=True, digits=digits) for seed, kind in enumerate(kinds)]
    parts, blocks = zip(*made, strict=True)
    packed = Packed(blocks, LargePageAllocator())
    assert packed.struct.kind == c.MIXED
    for rows, threads in ((1, 1), (5, 2), (40, 3)):
        check(packed, tokens(rows, 96), parts, threads)


def test_parts_of_different_types_that_do_not_fill_panels_are_packed_as_floats():
    parts, blocks = zip(*[linear(kind, 36, 64, seed) for seed, kind in enumerate(("Q4_0", "Q8_0"))], strict=True)
    packed = Packed(blocks, LargePageAllocator())
    assert packed.struct.kind == c.FULL
    check(packed, tokens(3, 64), parts)


@pytest.mark.parametrize("rows", [1, 6])
def test_gate_and_up_are_multiplied(rows):
    parts, blocks = zip(*[linear("Q4_0", 72, 64, seed) for seed in (0, 1)], strict=True)
    packed, as_floats = (Packed(each, LargePageAllocator(), paired=True) for each in (blocks, parts))
    layout = [multiply(each, tokens(rows, 64)) for each in (packed, as_floats)]
    assert torch.allclose(*layout, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("digits", [2, 3])
@pytest.mark.parametrize("kind", TYPES)
def test_zeros_tiny_and_huge_numbers_and_what_is_no_number(kind, digits):
    part, blocks = linear(kind, 32, 256, digits=digits)
    packed = Packed([blocks], LargePageAllocator())
    ordinary = tokens(1, 256)[0]
    x = torch.stack([torch.zeros(256), ordinary * 1e-37, ordinary * 1e-20, ordinary * 1e30, ordinary, ordinary])
    x[4, 70], x[5, 9] = torch.nan, torch.inf
    got, read = multiply(packed, x), rounded(x) if digits == 2 else x
    wanted = read.double() @ part.weight.double().T
    assert (got[0] == 0).all() and (got[1].abs() < 1e-30).all()
    largest = x[2:4].abs().amax(1, keepdim=True).double() * part.weight.double().abs().sum(1)
    assert ((got[2:4] - wanted[2:4]).abs() <= 1e-6 * largest).all()
    assert not got[4:].isfinite().any()


@pytest.mark.parametrize("kind", TYPES)
def test_a_packed_row_is_what_dequantising_the_file_gives(kind):
    part, blocks = linear(kind, 70, 512)
    packed = Packed([blocks], LargePageAllocator())
    table, row = c.RowTable(None, ctypes.pointer(packed.struct)), torch.full((512,), torch.nan)
    for output in (0, 17, 69):
        c.functions().selfspec_row(ctypes.byref(table), output, 512, row.data_ptr())
        assert torch.equal(row, part.weight[output])
