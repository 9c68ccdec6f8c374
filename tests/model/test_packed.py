"""Packed weights: the smallest kind that loses none, the same bits in either size, and as precise by AMX."""

from __future__ import annotations

import ctypes
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.executors.cpu.packed import Packed, fits_half
from selfspec.kernels import compiled_call as c
from selfspec.kernels.large_pages import LargePageAllocator
from selfspec.model.draft_vocabulary import DraftHead
from selfspec.model.llama_weights import Linear
from tests.helpers import generate, make_prompts
from tests.models import build, rounded
from tests.target import Target

KINDS = [pytest.param(getattr(c, name), id=name.lower()) for name in ("FULL", "HALF", "PAIRS", "AMX")]


@cache
def smallest():
    """Asked in tests alone: modules are imported on machines without a compiler, too."""
    return c.functions().selfspec_smallest(False)


def weights(*sizes, seed=0, biased=False):
    generator = torch.Generator().manual_seed(seed)
    return [
        Linear(
            torch.randn(out, inputs, generator=generator).bfloat16().float(),
            torch.randn(out, generator=generator) if biased else None,
        )
        for out, inputs in sizes
    ]


def packed_as(kind, parts, paired=False):
    """Packed in a kind of one's own choice."""
    if kind == c.AMX != smallest():
        pytest.skip("this processor has no AMX, or the system does not grant it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packed, "_kinds", lambda self: [kind])
        return Packed(parts, LargePageAllocator(), paired)


def multiply(packed, x, threads=1):
    struct, out = ctypes.byref(packed.struct), torch.full((len(x), packed.num_outputs), torch.nan)
    room = torch.full((c.functions().selfspec_linear_floats(struct, len(x), threads),), torch.nan)
    c.functions().selfspec_linear(struct, x.data_ptr(), len(x), out.data_ptr(), None, 0.0, room.data_ptr(), threads)
    return out


@given(
    outputs=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    inputs=st.integers(1, 130),
    rows=st.integers(1, 40),
    threads=st.integers(1, 3),
    biased=st.booleans(),
)
def test_half_the_memory_gives_the_same_bits(outputs, inputs, rows, threads, biased):
    parts = weights(*((out, inputs) for out in outputs), biased=biased)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))
    full, half = multiply(packed_as(c.FULL, parts), x), multiply(packed_as(c.HALF, parts), x, threads)
    assert torch.equal(half, full)


@pytest.mark.parametrize("kind", KINDS)
@given(
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 130),
    rows=st.integers(1, 53),
    threads=st.integers(1, 3),
    biased=st.booleans(),
)
def test_products_are_as_precise_as_float32_and_a_rows_bits_its_own(kind, outputs, inputs, rows, threads, biased):
    parts = weights((outputs, inputs), biased=biased)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)) * 1000
    packed = packed_as(kind, parts)
    got, [(weight, bias)] = multiply(packed, x, threads), parts
    read = x.bfloat16() if kind == c.PAIRS else x
    wanted = read.double() @ weight.double().T + (0 if bias is None else bias.double())
    most = x.double().abs() @ weight.double().abs().T + 1
    assert ((got - wanted).abs() / most).max() < (inputs + 3) * 2**-24
    assert torch.equal(got, torch.cat([multiply(packed, row) for row in x.split(1)]))


def test_tokens_are_rounded_to_the_nearest_and_what_is_no_number_stays_none():
    one = packed_as(c.PAIRS, [Linear(torch.eye(8), None)])
    ties = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 3e38, -(2**-100), 1 + 2**-9, 0.0]
    x = torch.tensor([ties])
    assert torch.equal(multiply(one, x), x.bfloat16().float()) and not torch.equal(multiply(one, x), x)
    for bits in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF):  # NaNs of both signs
        x[0, 3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        assert multiply(one, x)[0, 3].isnan()


def test_the_smallest_kind_is_taken_that_loses_nothing():
    parts = weights((64, 64), (64, 64))
    small = Packed(parts, LargePageAllocator())
    assert small.struct.kind == smallest() and fits_half(parts[0].weight)
    assert fits_half(parts[0].weight.half().double()) and not fits_half(torch.full((3,), 2**-10 + 1).half())
    parts[1].weight[63, 63] += 2**-12
    assert not fits_half(parts[1].weight)
    large = Packed(parts, LargePageAllocator())
    assert large.struct.kind == c.FULL
    half = Packed([Linear(part.weight.bfloat16(), None) for part in parts], LargePageAllocator())
    assert half.struct.kind == c.functions().selfspec_smallest(True) in (c.PAIRS, smallest())
    assert large.num_bytes == 2 * half.num_bytes == 2 * small.num_bytes == 4 * 128 * 64


def test_a_model_whose_weights_no_longer_fit_half_is_packed_whole_and_back():
    model, [prompt] = rounded(build("qwen2")), make_prompts([9])
    target = Target(model, backend="compiled")
    up = model.model.layers[1].mlp.up_proj.weight

    def decode():
        tokens = target.generate([prompt], max_tokens=8, exit_layer=2)[0].token_ids
        assert tokens == generate(model, prompt, 8)
        return tokens

    first, small = decode(), target.split.compiled.num_bytes
    whole = Target(build("qwen2"), backend="compiled").split.compiled.num_bytes
    assert 1.5 * small < whole
    before = up.detach().clone()
    with torch.no_grad():
        up.mul_(-1 / 3)
    assert decode() != first
    assert small < target.split.compiled.num_bytes < whole
    up.data = before
    assert decode() == first
    assert target.split.compiled.num_bytes == small


def test_a_part_of_the_vocabulary_is_packed_as_small():
    model = rounded(build("llama"))
    split, head = Target(model, backend="compiled").split, DraftHead.of(model, model.lm_head)
    part = head.subset(40, split.frequencies)
    assert split.compiled.draft_head(part)[0].struct.kind == smallest()
    hidden = torch.randn(3, 32)
    whole = split.compiled.product(split.compiled.packed_head, hidden, norm=True)
    assert torch.equal(split.compiled.subset_logits(hidden, part), whole[:, part.tokens])
