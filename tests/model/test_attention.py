"""Attention of packed ragged rows against a formula in float64, over any pages, lengths and reaches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from selfspec.model.attention import attend
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.row_groups import SHORT
from tests.slow import FRESH

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


PACKS = given(
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


@PACKS
def test_packs_attend_as_the_formula_says(**case):
    check_pack(**case)


@pytest.mark.slow
@FRESH
@PACKS
def test_fresh_packs_attend_as_the_formula_says(**case):
    check_pack(**case)


@pytest.mark.parametrize(("page_size", "sinks", "softcap"), [(4, False, 2.0), (60, True, None)])
def test_a_row_that_prefills_stands_beside_rows_that_decode(page_size, sinks, softcap):
    rows = [(7, 1, 0), (3, SHORT + 8, 0), (0, 1, 1), (12, 5, 0), (0, SHORT + 1, 0), (9, 1, 0)]
    check_pack(rows, page_size, 2, 2, 0, softcap=softcap, sinks=sinks)


# ---------------------------------------------------------------------------------------------------------- prompts


@pytest.fixture
def masks():
    """The masks that torch's attention is given, and whether it is told to be causal."""
    given = []

    class Listening(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if function is F.scaled_dot_product_attention:
                given.append((type(kwargs.get("attn_mask")), kwargs.get("is_causal", False)))
            return function(*args, **kwargs)

    with Listening():
        yield given


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0, SHORT + 9, 0)], [(type(None), True)]),
        ([(7, SHORT + 9, 0)], [(CausalBias, False)]),
        ([(0, SHORT + 1, 0), (5, SHORT + 2, 1)], [(type(None), True), (CausalBias, False)]),
        ([(3, 1, 0), (0, SHORT + 1, 0)], [(torch.Tensor, False), (type(None), True)]),
    ],
)
def test_no_mask_tensor_is_made_for_prompts(masks, rows, expected):
    check_pack(rows, 8, 2, 2, 0, window=90)  # longer than the rows
    assert masks == expected
