"""Attention of packed ragged rows against a formula in float64, over any pages, lengths and reaches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.model.attention import attend
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.row_groups import SHORT, plan_groups

HEAD_DIM = 4


def by_formula(query, keys, values, at, scale, window, chunk, softcap, sink):
    """One query head at position `at`, over its row's keys `[length, head_dim]`, in float64."""
    seen = [
        j for j in range(at + 1) if (window is None or at - j < window) and (chunk is None or j // chunk == at // chunk)
    ]
    scores = (keys[seen].double() @ query.double()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[None]])
    weights = scores.softmax(0)[: len(seen)]
    return (weights @ values[seen].double()).float()


def check_pack(rows, page_size, kv_heads, share, seed, window=None, chunk=None, softcap=None, sinks=False, scale=None):
    """`rows`: (cached tokens, new tokens, pages left idle before this row's)."""
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * share
    need = [-(-(old + new) // page_size) for old, new, _ in rows]
    cache = PagedCache(sum(need) + sum(idle for *_, idle in rows), page_size)
    tables = []
    for count, (_, _, idle) in zip(need, rows, strict=True):
        cache.reserve(idle * page_size)
        tables.append(cache.reserve(count * page_size))
    full = [torch.randn(2, 1, kv_heads, old + new, HEAD_DIM, generator=generator) for old, new, _ in rows]
    for storage in cache.layer(0, full[0][0, 0].transpose(0, 1), full[0][1, 0].transpose(0, 1)):
        storage.normal_(std=9.0, generator=generator)  # what no row has written may be anything finite
    for table, kv, (old, _, _) in zip(tables, full, rows, strict=True):
        if old:
            PackedRows(cache, [Span(table, 0, old)]).update(kv[0, :, :, :old], kv[1, :, :, :old], 0)
    packed = PackedRows(cache, [Span(t, old, new) for t, (old, new, _) in zip(tables, rows, strict=True)])
    key, value = (
        torch.cat([kv[i, :, :, -new:] for kv, (_, new, _) in zip(full, rows, strict=True)], 2) for i in (0, 1)
    )
    query = torch.randn(1, heads, packed.num_tokens, HEAD_DIM, generator=generator)
    s_aux = torch.randn(heads, generator=generator) if sinks else None
    kinds = None if chunk is None else ["chunked_attention"]
    module = SimpleNamespace(layer_idx=0, config=SimpleNamespace(layer_types=kinds, attention_chunk_size=chunk))
    packed.update(key, value, 0)
    got, weights = attend(
        module, query, key, value, None, scale, sliding_window=window, packed=packed, softcap=softcap, s_aux=s_aux
    )
    assert weights is None
    assert got.shape == (1, packed.num_tokens, heads, HEAD_DIM)
    used = HEAD_DIM**-0.5 if scale is None else scale
    index = 0
    for kv, (old, new, _) in zip(full, rows, strict=True):
        for at in range(old, old + new):
            for head in range(heads):
                keys, values = kv[0, 0, head // share], kv[1, 0, head // share]
                sink = None if s_aux is None else s_aux[head]
                want = by_formula(query[0, head, index], keys, values, at, used, window, chunk, softcap, sink)
                torch.testing.assert_close(got[0, index, head], want, rtol=1e-4, atol=1e-5)
            index += 1


a_row = st.tuples(st.integers(0, 20), st.one_of(st.integers(1, 6), st.integers(1, 45)), st.integers(0, 1))


@settings(max_examples=60)
@given(
    rows=st.lists(a_row, min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 8, 70]),
    kv_heads=st.integers(1, 2),
    share=st.integers(1, 3),
    window=st.sampled_from([None, 1, 3, 50]),
    chunk=st.sampled_from([None, None, 2, 7]),
    softcap=st.sampled_from([None, None, 2.0]),
    sinks=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 99),
)
def test_any_pack_attends_as_the_formula_says(**case):
    check_pack(**case)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("page_size", [4, 60])
def test_a_row_that_prefills_stands_beside_rows_that_decode(page_size, sinks, softcap):
    rows = [(7, 1, 0), (3, SHORT + 8, 0), (0, 1, 1), (12, 5, 0), (0, SHORT + 1, 0), (9, 1, 0)]
    check_pack(rows, page_size, 2, 2, 0, softcap=softcap, sinks=sinks)


def grouped(spans, page_size=50, num_pages=12):
    packed = PackedRows(PagedCache(num_pages, page_size), [Span(*span) for span in spans])
    return plan_groups(packed)


def test_rows_on_neighbouring_pages_are_read_without_a_gather():
    [group] = grouped([([3], 4, 1), ([4], 9, 1), ([6], 2, 1)])  # page 5 lies idle between
    assert group.pages == slice(3, 7)
    assert group.limit == 10
    [alone] = grouped([([3], 4, 2)])
    assert (alone.pages, alone.gather, alone.scatter, alone.single) == (slice(3, 4), None, None, False)
    [apart] = grouped([([0], 4, 1), ([9], 9, 1)])
    assert apart.pages.tolist() == [[0], [9]]
    [several] = grouped([([0, 5], 4, 1), ([9], 2, 1)], page_size=4)
    assert several.pages.tolist() == [[0, 5], [9, 9]]  # the shorter row's second column is masked


def test_long_rows_go_alone_and_short_ones_together():
    groups = grouped([([0], 0, 2), ([1], 0, SHORT + 1), ([2], 0, SHORT), ([3], 0, SHORT + 9)])
    assert [group.positions.shape[1] for group in groups] == [SHORT, SHORT + 1, SHORT + 9]
