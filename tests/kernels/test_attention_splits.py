"""How attention over pages is divided: bytes by launches and by the interpreter, kernels, constant order of sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter

from selfspec.executors.cuda.rounds import token_capacity
from selfspec.kernels import paged_attention, reference
from selfspec.kernels.attention_splits import Device, tiling_of
from tests.kernels import samples
from tests.kernels.attention_bytes import decoding, launches_of, moved_by
from tests.slow import slow

HEADS = [(32, 8, 128), (32, 32, 128), (9, 3, 64), (16, 8, 256)]


def of_recording(batch, context, new, heads):
    """A call of decoding in a recording: rows are shorter than what it is for."""
    return decoding(batch, context, new, *heads, token_capacity(context, 1 << 30))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("context", [1024, 8192])
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_few_bytes_are_moved_beyond_what_the_operation_needs(batch, context, new, heads):
    """A row alone has too few splits to fill a device at that price: there, time is latency and not bytes."""
    call = of_recording(batch, context, new, heads)
    moved = moved_by(launches_of(lambda: paged_attention.attend(*call)))
    num_heads, kv_heads, dim = heads
    needed = batch * dim * 2 * (2 * context * kv_heads + 2 * new * num_heads)
    assert needed <= moved.total <= (1.15 if batch > 1 else 1.6) * needed


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("batch", [1, 32])
def test_programs_fill_a_device(batch, heads):
    call = of_recording(batch, 8192, 1, heads)
    programs = moved_by(launches_of(lambda: paged_attention.attend(*call))).programs
    assert programs >= Device().processors


@pytest.mark.parametrize(
    ("batch", "context", "kernels"),
    [
        (32, 1024, ["_split"]),
        (1, 64, ["_split"]),
        (32, 8192, ["_split", "_combine"]),
        (1, 1024, ["_split", "_combine"]),
    ],
)
def test_one_kernel_runs_where_one_split_is_enough(batch, context, kernels):
    call = decoding(batch, context, 1, 32, 8, 128, max(context, 64) if batch == 1 else 2 * context)
    launches = launches_of(lambda: paged_attention.attend(*call))
    assert [launch.kernel for launch in launches] == kernels
    partial = launches[0].arguments["partial_ptr"]
    assert (partial is None) == (len(kernels) == 1)


def test_splits_follow_from_the_device():
    queries, keys, _, layout, _ = of_recording(4, 1024, 1, HEADS[0])
    large, small = (tiling_of(queries, keys, layout, None, None, device=Device(n)) for n in (132, 16))
    assert large.splits.parts > small.splits.parts == 1
    narrow = tiling_of(queries, keys, layout, None, None, device=Device(shared_bytes=100 << 10))
    assert narrow.options["num_stages"] < large.options["num_stages"]


def test_one_long_row_does_not_keep_a_batch_of_short_ones_waiting():
    queries, keys, values, layout, scale = decoding(32, 100, 1, 32, 8, 128, 32768)
    layout.lengths[0] = 32768
    moved = moved_by(launches_of(lambda: paged_attention.attend(queries, keys, values, layout, scale)))
    assert moved.programs == 8 * (31 + 16)


@pytest.fixture
def products_by_rows(monkeypatch):
    """The interpreter's products row by row, as tensor cores round: numpy's depend on a row's place in the matrix."""

    def dot(builder, a, b, d, *given):
        rows = [np.matmul(row, b.data, dtype=d.data.dtype) for row in a.data]
        return interpreter.TensorHandle(np.stack(rows) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.parametrize(
    "options",
    [slow({}), {"window": 70}, slow({"chunk": 96}), slow({"sinks": torch.tensor([0.5, 3.0, 0.0, -1.0])})],
    ids=lambda options: next(iter(options), "plain"),
)
def test_with_a_fixed_split_and_tile_a_row_has_the_same_bits_in_any_call(products_by_rows, options):
    """Beside other rows, in another slot, in a recording for more tokens, in tiles that begin elsewhere."""
    fixed = {"tile_rows": 16, "split": 64, **options}
    page_size = 16 if "window" in options else 64  # smaller steps, so that a window begins in another one at each token
    alone = samples.paged([(180, 9)], 4, 2, 16, page_size)
    given = (alone.queries, alone.keys, alone.values)
    wanted = paged_attention.attend(*given, alone.layout, 0.25, **fixed)
    torch.testing.assert_close(wanted, reference.attend(*given, alone.layout, 0.25, **options), rtol=1e-4, atol=1e-5)
    other = samples.paged([(200, 5), (0, 0), (11, 20)], 4, 2, 16, page_size, seed=1)
    got = paged_attention.attend(*beside(other, alone, 2000), 0.25, **fixed)
    assert torch.equal(got[len(other.queries) :], wanted)
    for taken in (slice(0, 1), slice(1, 9)):
        got = paged_attention.attend(alone.queries[taken], *given[1:], part_of(alone.layout, taken), 0.25, **fixed)
        assert torch.equal(got, wanted[taken])


def part_of(layout, taken):
    """A call of some new tokens of the only row, after those before them."""
    new = taken.stop - taken.start
    length = layout.lengths - int(layout.counts) + taken.stop
    return layout._replace(
        counts=torch.full_like(layout.counts, new), lengths=length, rows=layout.rows[taken], slots=layout.slots[taken],
        positions=layout.positions[taken], most_new=new, most_tokens=int(length),
    )  # fmt: skip


@pytest.mark.parametrize("page_size", [slow(1), 16])
def test_with_a_fixed_split_a_row_has_the_same_bits_in_any_pages(products_by_rows, page_size):
    fixed = {"tile_rows": 16, "split": 64}
    call = samples.paged([(180, 9)], 4, 2, 16, 64)
    wanted = paged_attention.attend(call.queries, call.keys, call.values, call.layout, 0.25, **fixed)
    keys, values = (one.reshape(-1, page_size, *one.shape[2:]) for one in (call.keys, call.values))
    parts = 64 // page_size
    pages = (call.layout.pages[..., None] * parts + torch.arange(parts, dtype=torch.int32)).flatten(1)
    layout = call.layout._replace(pages=pages.contiguous())
    assert torch.equal(paged_attention.attend(call.queries, keys, values, layout, 0.25, **fixed), wanted)


def test_with_a_fixed_split_a_row_has_the_same_bits_whether_or_not_others_have_several():
    fixed = {"tile_rows": 16, "split": 64}
    alone = samples.paged([(40, 3)], 4, 2, 16, 64)
    wanted = paged_attention.attend(alone.queries, alone.keys, alone.values, alone.layout, 0.25, **fixed)
    got = paged_attention.attend(*beside(samples.paged([(200, 5)], 4, 2, 16, 64, seed=1), alone), 0.25, **fixed)
    assert torch.equal(got[5:], wanted)


def beside(other, alone, most_tokens=0):
    """The rows of two calls in one, those of `alone` last."""
    below, above = other.layout, alone.layout
    width = max(below.pages.shape[1], above.pages.shape[1])
    below_pages, above_pages = (
        torch.nn.functional.pad(pages, (0, width - pages.shape[1]))
        for pages in (below.pages, above.pages + len(other.keys))
    )
    owners = torch.where(above.rows < 0, -1, above.rows + len(below.counts))
    layout = below._replace(
        starts=torch.cat([below.starts, above.starts + len(other.queries)]),
        counts=torch.cat([below.counts, above.counts]), lengths=torch.cat([below.lengths, above.lengths]),
        pages=torch.cat([below_pages, above_pages]), rows=torch.cat([below.rows, owners]),
        slots=torch.cat([below.slots, above.slots]), positions=torch.cat([below.positions, above.positions]),
        most_new=max(below.most_new, above.most_new),
        most_tokens=max(below.most_tokens, above.most_tokens, most_tokens),
    )  # fmt: skip
    tensors = (torch.cat([getattr(one, name) for one in (other, alone)]) for name in ("queries", "keys", "values"))
    return (*tensors, layout)


@pytest.mark.parametrize("split", [0, -64, 100])
def test_a_split_that_steps_do_not_fill_is_refused(split):
    call = samples.paged([(20, 3)], 4, 2, 16, 16)
    for attend in (paged_attention.attend, reference.attend):
        with pytest.raises(ValueError, match=f"split must be a positive multiple of 64 or None, got {split}"):
            attend(call.queries, call.keys, call.values, call.layout, 0.25, split=split)
