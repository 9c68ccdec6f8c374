"""Attention over pages: the plain twin against a formula, the kernel against the twin, both whatever unread slots hold.

Every page of these calls holds NaN wherever no row has written.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.kernels import reference
from selfspec.kernels.attention_splits import tile_rows_for
from selfspec.model.attention import Reach, attend_rows
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from tests.kernels import samples
from tests.slow import slow

paged_attention = pytest.importorskip("selfspec.kernels.paged_attention", reason="Triton is not installed")

# (tokens held before, new tokens); no new tokens: an empty slot
a_row = st.one_of(st.tuples(st.integers(0, 40), st.integers(1, 6)), st.tuples(st.integers(0, 9), st.just(0)))
some_rows = st.lists(a_row, min_size=1, max_size=4).filter(lambda rows: any(new for _, new in rows))


def by_formula(call, scale, window=None, chunk=None, softcap=None, sinks=None):
    """Every query on its own, in float64, over the tokens that it may see; zeros at padding."""
    layout, out = call.layout, torch.zeros(call.queries.shape, dtype=torch.float64)
    page_size, share = call.keys.shape[1], call.queries.shape[1] // call.keys.shape[2]
    for token, slot in enumerate(layout.rows.tolist()):
        if slot < 0:
            continue
        length, own = int(layout.lengths[slot]), int(layout.positions[token])
        seen = [
            at
            for at in range(min(length, own + 1))
            if (window is None or own - at < window) and (chunk is None or at // chunk == own // chunk)
        ]
        pages = layout.pages[slot].tolist()
        places = [pages[at // page_size] * page_size + at % page_size for at in seen]
        for head in range(call.queries.shape[1]):
            keys = call.keys.flatten(0, 1)[places, head // share].double()
            values = call.values.flatten(0, 1)[places, head // share].double()
            scores = keys @ call.queries[token, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double()[None]])
            out[token, head] = scores.softmax(0)[: len(seen)] @ values
    return out.float()


close = {"rtol": 1e-4, "atol": 1e-5}
reaches = st.fixed_dictionaries(
    {},
    optional={
        "window": st.sampled_from([1, 4, 13]),
        "chunk": st.sampled_from([4, 16]),
        "softcap": st.just(3.0),
        "sinks": st.just(True),
    },
)
heads_of = st.sampled_from([(1, 1), (4, 2), (6, 2), (2, 2), (5, 1)])


def with_sinks(options, heads):
    made = dict(options)
    if made.pop("sinks", False):
        made["sinks"] = torch.linspace(-2, 2, heads)
    return made


@settings(max_examples=30)
@given(
    rows=some_rows,
    heads=heads_of,
    page_size=st.sampled_from([1, 3, 16]),
    padding=st.integers(0, 1),
    options=reaches,
    seed=st.integers(0, 99),
)
def test_twin_is_the_formula(rows, heads, page_size, padding, options, seed):
    call = samples.paged(rows, *heads, 4, page_size, seed, padding)
    options = with_sinks(options, heads[0])
    got = reference.attend(call.queries, call.keys, call.values, call.layout, 0.5, **options)
    torch.testing.assert_close(got, by_formula(call, 0.5, **options), **close)


@settings(max_examples=12)
@given(
    rows=some_rows,
    heads=heads_of,
    dim=st.sampled_from([8, 64, 80]),
    page_size=st.sampled_from([1, 3, 16, 64, 70]),
    padding=st.integers(0, 1),
    options=reaches,
    seed=st.integers(0, 99),
)
def test_kernel_is_its_twin(rows, heads, dim, page_size, padding, options, seed):
    call = samples.paged(rows, *heads, dim, page_size, seed, padding)
    check(call, **with_sinks(options, heads[0]))


def check(call, **options):
    scale = call.queries.shape[-1] ** -0.5
    wanted = reference.attend(call.queries, call.keys, call.values, call.layout, scale, **options)
    got = paged_attention.attend(call.queries, call.keys, call.values, call.layout, scale, **options)
    assert got.dtype == call.queries.dtype
    torch.testing.assert_close(got, wanted, **(close if got.dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}))
    return got


@pytest.mark.parametrize("split", [None, 256])
@pytest.mark.parametrize("dim", [64, slow(256)])
def test_kernel_reads_rows_of_several_stretches(dim, split):
    edges = [256 + offset for offset in (-3, -2, 0)]
    check(samples.paged([(edge, 3) for edge in edges] + [(2 * 256 + 5, 1)], 2, 1, dim, 64), split=split)


@pytest.mark.parametrize(
    "options", [{"window": 40}, {"chunk": 64}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, 9.0])}]
)
def test_stretches_that_hold_nothing_visible_add_nothing(options):
    check(samples.paged([(600, 2), (255, 4)], 2, 1, 16, 16), **options)


@pytest.mark.parametrize("options", [{}, slow({"window": 9}), slow({"sinks": torch.tensor([0.5, 3.0, 0.0, -1.0])})])
def test_kernel_reads_prompts_in_blocks_of_queries(options):
    assert tile_rows_for(2, 40, 4) < 2 * 40
    check(samples.paged([(0, 40), (30, 33), (5, 1)], 4, 2, 16, 16), **options)


def test_bfloat16_is_read_as_it_is():
    check(samples.paged([(20, 3), (0, 1)], 4, 2, 64, 16, dtype=torch.bfloat16))


def test_queries_may_come_head_by_head():
    call = samples.paged([(20, 3)], 4, 2, 16, 16)
    wanted = reference.attend(call.queries, call.keys, call.values, call.layout, 0.25)
    turned = call.queries.transpose(0, 1).contiguous().transpose(0, 1)
    got = paged_attention.attend(turned, call.keys, call.values, call.layout, 0.25)
    torch.testing.assert_close(got, wanted, **close)
    assert got.is_contiguous()


@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), min_size=1, max_size=4),
    page_size=st.sampled_from([3, 16, 64]),
    window=st.sampled_from([None, 5]),
    seed=st.integers(0, 99),
)
def test_twin_is_the_backend_that_is_used_everywhere(rows, page_size, window, seed):
    call = samples.paged(rows, 4, 2, 8, page_size, seed)
    layout = call.layout
    tables = [[page for page in table if page < len(call.keys)] for table in layout.pages.tolist()]
    cache = PagedCache(len(call.keys), page_size)
    packed = PackedRows(cache, [Span(t, old, new) for t, (old, new) in zip(tables, rows, strict=True)])
    keys, values = call.keys.nan_to_num(), call.values.nan_to_num()
    wanted = attend_rows(packed, call.queries.transpose(0, 1), keys, values, Reach(window, None), 0.3)
    got = reference.attend(call.queries, call.keys, call.values, layout, 0.3, window=window)
    torch.testing.assert_close(got, wanted, **close)
    assert torch.equal(layout.positions, packed.positions[0])
