"""The kernels of a fused layer in the interpreter: equal to their references."""

from __future__ import annotations

import pytest
import torch

from selfspec.kernels import reference
from selfspec.kernels.layout import Norm, Rotation
from tests.kernels import samples

pytest.importorskip("triton", reason="Triton is not installed")

from selfspec.kernels.fused_layer import add_norm, gate, rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.usefixtures("rounds_to_nearest")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def a_norm(size, dtype, offset, eps=1e-6):
    return Norm(torch.randn(size).mul(0.1).add(1.0 - offset).to(dtype), eps, offset)


def agree(got, wanted, roundings=1):
    """Equal up to so many roundings: sums in float32 are made in another order."""
    rounding, least = {
        torch.float32: (2e-6, 2e-6), torch.bfloat16: (2**-7, 1e-4), torch.float16: (2**-10, 2e-5)
    }[wanted.dtype]  # fmt: skip
    torch.testing.assert_close(got, wanted, rtol=roundings * rounding, atol=least, equal_nan=True)


@each_dtype
@pytest.mark.parametrize(
    ("count", "size", "parts", "offset"),
    [(3, 64, "branch norm", 0.0), (1, 100, "norm", 0.0), (2, 24, "branch norm post", 1.0), (2, 576, "branch post", 1.0),
     (1, 1, "branch", 0.0), (2, 24, "branch norm post", 0.0)],
)  # fmt: skip
def test_addition_and_norm(count, size, parts, offset, dtype):
    hidden, branch = torch.randn(2, count, size).to(dtype)
    norm, post = a_norm(size, dtype, offset), a_norm(size, dtype, offset, 1e-3)
    named = {"branch": branch, "norm": norm, "post": post}
    call = hidden, *(one if name in parts.split() else None for name, one in named.items())
    for got, wanted in zip(add_norm(*call), reference.add_norm(*call), strict=True):
        if wanted is None:
            assert got is None
        else:
            agree(got, wanted)


def qkv_call(rows, heads, kv_heads, dim, dtype, padding=0, norms=None, seed=0):
    """A call of `rotate`: what no row has written is NaN, and so are unused lines of the tables."""
    paged = samples.paged(rows, heads, kv_heads, dim, 4, seed, padding=padding, dtype=dtype)
    count, longest = len(paged.layout.positions), paged.layout.most_tokens
    angles = torch.randn(2, longest + 3, dim // 2).to(dtype)
    angles[:, longest:] = float("nan")
    qkv = torch.randn(count, (heads + 2 * kv_heads) * dim + 5).to(dtype)[:, 5:]
    pages = torch.full((2, *paged.keys.shape), float("nan"), dtype=dtype)
    both = (None, None) if norms is None else (a_norm(dim, dtype, norms), a_norm(dim, dtype, norms))
    return qkv, *pages, paged.layout, Rotation(*angles, *both)


@each_dtype
@pytest.mark.parametrize(
    ("rows", "heads", "padding", "norms"),
    [([(5, 2), (0, 0), (3, 1)], (2, 1, 8), 1, None), ([(0, 2)], (2, 2, 12), 0, 0.0), ([(9, 1)], (3, 1, 8), 0, 1.0)],
)
def test_rotation_and_write(rows, heads, padding, norms, dtype):
    call = qkv_call(rows, *heads, dtype, padding, norms)
    made = []
    for kernel in (rotate, reference.rotate):
        keys, values = call[1].clone(), call[2].clone()
        made.append((kernel(call[0], keys, values, *call[3:]), keys, values))
    for got, wanted in zip(*made, strict=True):
        agree(got, wanted)
    written = sum(new for _, new in rows)
    assert int(made[0][1].isfinite().all(-1).all(-1).sum()) == written, "no slot but those of new tokens is written"


@each_dtype
@pytest.mark.parametrize(("count", "inner", "activation"), [(2, 48, "silu"), (1, 1500, "gelu_tanh"), (1, 1, "silu")])
def test_activation_and_product(count, inner, activation, dtype):
    gate_up = torch.randn(count, 2 * inner).mul(3).to(dtype)
    agree(gate(gate_up, activation), reference.gate(gate_up, activation), roundings=2)  # activation and product


@each_dtype
def test_a_token_has_the_same_bits_alone_and_among_others(dtype):
    """Exact mode relies on it."""
    hidden, branch = torch.randn(2, 5, 100).to(dtype)
    norm, post = a_norm(100, dtype, 0.0), a_norm(100, dtype, 0.0)
    qkv, keys, values, layout, rotation = qkv_call([(3, 5)], 2, 1, 8, dtype, norms=0.0)
    pages = keys.clone(), values.clone()
    together = (
        *add_norm(hidden, branch, norm, post), gate(hidden, "silu"), rotate(qkv, *pages, layout, rotation)
    )  # fmt: skip
    for i in range(5):
        at = slice(i, i + 1)
        place = layout._replace(slots=layout.slots[at], positions=layout.positions[at])
        own = (
            *add_norm(hidden[at], branch[at], norm, post), gate(hidden[at], "silu"),
            rotate(qkv[at], keys, values, place, rotation),
        )  # fmt: skip
        assert all(torch.equal(one, all_of_them[at]) for one, all_of_them in zip(own, together, strict=True))
    for one, all_of_them in zip((keys, values), pages, strict=True):
        assert torch.equal(one.nan_to_num(), all_of_them.nan_to_num())


def test_no_tokens_are_no_work():
    hidden = torch.zeros(0, 8)
    assert [one.shape for one in add_norm(hidden, hidden, a_norm(8, torch.float32, 0.0))] == [(0, 8)] * 2
    assert gate(hidden, "silu").shape == (0, 4)
    pages, angles = torch.zeros(2, 1, 4, 1, 2), torch.zeros(4, 1)
    layout = samples.layout_of([(0, 0)], 4)[0]
    assert rotate(hidden, *pages, layout, Rotation(angles, angles)).shape == (0, 2, 2)
