"""The attention of a layer in one launch, in the interpreter: equal to its reference, in a constant order of sums."""

from __future__ import annotations

import pytest
import torch

from selfspec.kernels import reference
from selfspec.kernels.layout import Norm, Rotation
from tests.kernels import samples

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter

from selfspec.kernels import layer_attention
from selfspec.kernels.layer_attention import rotate_attend

pytestmark = pytest.mark.usefixtures("rounds_to_nearest")
RAGGED = [(5, 2), (0, 0), (253, 6), (600, 1), (0, 3)]  # an empty slot, a split that begins among the new tokens
SHAPES = [(RAGGED, (4, 2, 16)), ([(30, 9)], (3, 1, 8)), ([(18, 2)], (2, 2, 12))]


def a_call(rows, heads, kv_heads, dim, dtype, padding=0, has_norms=False, seed=0):
    """Arguments; the pages hold what the rows held before, and NaN elsewhere, in the places of new tokens, too."""
    call = samples.paged(rows, heads, kv_heads, dim, 16, seed, padding=padding, dtype=dtype)
    for pages in (call.keys, call.values):
        pages.flatten(0, 1)[call.layout.slots[call.layout.slots >= 0]] = float("nan")
    count = len(call.queries)
    qkv = torch.randn(count, (heads + 2 * kv_heads) * dim + 5).to(dtype)[:, 5:]
    angle = torch.rand(call.layout.most_tokens, dim // 2) * 6
    norms = [Norm(torch.randn(dim).mul(0.1).add(1.0).to(dtype), 1e-5) for _ in range(2)] if has_norms else [None, None]
    counters = torch.zeros(len(call.layout.counts) * call.layout.most_new * kv_heads, dtype=torch.int32)
    rotation = Rotation(angle.cos().to(dtype), angle.sin().to(dtype), *norms)
    return qkv, (call.keys, call.values), (call.layout, rotation, dim**-0.5, counters)


def results(run, qkv, pages, given, window=None):
    written = [one.clone() for one in pages]
    return [run(qkv, *written, *given, window), *written]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "heads"), SHAPES)
@pytest.mark.parametrize(("window", "has_norms"), [(None, False), (70, True)])
def test_it_is_rotation_write_and_attention(rows, heads, window, has_norms, dtype):
    call = a_call(rows, *heads, dtype, padding=1, has_norms=has_norms)
    got = results(rotate_attend, *call, window)
    wanted = results(reference.rotate_attend, *call, window)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for one, other in zip(got[1:], wanted[1:], strict=True):  # what is written: one rounding of each number
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding, equal_nan=True)
    torch.testing.assert_close(got[0], wanted[0], rtol=rounding, atol=2 * rounding)
    assert not got[0][call[2][0].rows < 0].any(), "zeros for padding"
    assert not call[2][3].any(), "counters are zeros again"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_does_not_matter_which_program_ends_last(dtype, monkeypatch):
    call = a_call(RAGGED, 4, 2, 16, dtype)
    wanted = results(rotate_attend, *call)
    builder, places = type(interpreter.interpreter_builder), []

    def backwards(self, x, y, z, set_place=builder.set_grid_idx):
        places.append(z)
        set_place(self, x, y, self.grid_dim[2] - 1 - z)

    monkeypatch.setattr(builder, "set_grid_idx", backwards)
    got = results(rotate_attend, *call)
    assert max(places) >= 2, "there are several splits"
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got, wanted, strict=True))
    assert not call[2][3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.usefixtures("sums_in_order")
def test_a_token_has_the_same_bits_alone_and_among_others(window, dtype):
    """New tokens one by one, against all of them in one call, beside another row."""
    heads, dim, old, new = (4, 2), 16, 250, 9
    qkv, pages, given = a_call([(30, 2), (old, new)], *heads, dim, dtype, has_norms=True)
    layout, *rest = given
    together, *_ = results(rotate_attend, qkv, pages, given, window)
    for at in range(new):
        place = slice(2 + at, 3 + at)
        own = layout._replace(
            starts=layout.starts[:1], counts=torch.ones_like(layout.counts[:1]), pages=layout.pages[1:],
            lengths=torch.full_like(layout.counts[:1], old + at + 1), rows=torch.zeros_like(layout.rows[place]),
            slots=layout.slots[place], positions=layout.positions[place], most_new=1, most_tokens=old + at + 1,
        )  # fmt: skip
        alone = rotate_attend(qkv[place], *pages, own, *rest, window)  # it writes, too
        assert torch.equal(alone, together[place]), f"new token {at}"


def test_wrong_arguments_are_refused():
    qkv, pages, given = a_call([(3, 1)], 2, 1, 8, torch.float32)
    layout, rotation, *rest = given
    norm = Norm(torch.ones(8), 1e-5, 1.0)
    offset = rotation._replace(q_norm=norm, k_norm=norm)
    for module in (layer_attention, reference):
        with pytest.raises(ValueError, match=r"q_norm.offset must be 0, got 1"):
            module.rotate_attend(qkv, *pages, layout, offset, *rest)
        with pytest.raises(ValueError, match=r"counters must be int32"):
            module.rotate_attend(qkv, *pages, *given[:-1], given[-1].long())
        with pytest.raises(ValueError, match=r"counters must be at least 1 numbers, got 0"):
            module.rotate_attend(qkv, *pages, *given[:-1], given[-1][:0])
