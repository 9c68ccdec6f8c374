"""Keys and values in two bytes per number: what is kept, what attention makes of it, and whose bits they are."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.executors.cpu.body import CompiledBody
from selfspec.kernels.rounding import rounded
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.split_model import SplitModel
from tests.models import build

HEADS = 6


@cache
def bodies(head_dim, kv_heads=2, window=None):
    """A body that keeps two bytes per number, and one of the same weights that keeps float32. Layers are attention
    alone: MLPs add zero."""
    kind = {"family": "llama"} if window is None else {"family": "mistral", "sliding_window": window}
    sizes = {"hidden_size": 48, "num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    model = build(**kind, **sizes, max_position_embeddings=512)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.q_proj.weight *= 3  # some keys count more than others
    weights = SplitModel(model).llama
    return [CompiledBody(weights._replace(activation_bytes=count)) for count in (2, 3)]


def call(body, pages, spans, tokens, stop=1, threads=1):
    try:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            return body.run(PackedRows(pages, spans), 0, stop, tokens)
    finally:
        torch.set_num_threads(1)


def some_tokens(count):
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(count))


def attention(body, tokens, keys, values):
    """The first layer's output in float64, `[N, hidden_size]`, for a row whose keys and values are given."""
    layer, (cos, sin) = body.layers[0], (each[: len(tokens), 0, None].double() for each in body.tables(len(tokens)))
    x = body.embedding[tokens].double()
    normed = x * (x.square().mean(-1, keepdim=True) + layer.norm.eps).rsqrt() * layer.norm.weight.double()
    q = (normed @ layer.q.weight.double().T).unflatten(-1, (HEADS, -1))
    q = q * cos + q.roll(q.shape[-1] // 2, -1) * sin
    keys, values = (each.double().repeat_interleave(HEADS // each.shape[1], 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * layer.scale
    away = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
    is_seen = (away >= 0) & (away < (layer.window or len(tokens)))
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return x + torch.einsum("hqk,khd->qhd", weights, values).flatten(1) @ layer.o.weight.double().T


@pytest.mark.parametrize("head_dim", [8, 16, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("window", [None, 21])
def test_attention_is_that_of_rounded_keys_and_values(head_dim, window):
    """Of long rows and short ones, in one call and token by token, across pages."""
    own, exact = bodies(head_dim, window=window)
    lengths, size = (100, 1, 37), 24
    pages, plain = (PagedCache(9, size, 4) for _ in range(2))
    rows = [some_tokens(n) for n in lengths]
    tables = [pages.reserve(n) for n in lengths]
    whole = [Span(table, 0, n) for table, n in zip(tables, lengths, strict=True)]
    got = call(own, pages, whole, torch.cat(rows)).split(lengths)
    call(exact, plain, whole, torch.cat(rows))
    for table, tokens, output in zip(tables, rows, got, strict=True):
        kept, original = (each.read(0, table, len(tokens)) for each in (pages, plain))
        assert all(torch.equal(mine, rounded(theirs)) for mine, theirs in zip(kept, original, strict=True))
        torch.testing.assert_close(output.double(), attention(own, tokens, *kept), rtol=1e-5, atol=2e-5)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    page_size=st.sampled_from([4, 7, 16, 64]),
    head_dim=st.sampled_from([8, 24, 48, 64]),
    kv_heads=st.sampled_from([1, 2, 3, 6]),
    window=st.sampled_from([None, 5]),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_a_tokens_bits_do_not_depend_on_what_shares_its_call(
    lengths, page_size, head_dim, kv_heads, window, threads, data
):
    """Rows in calls of many queries by several threads, against every token in a call alone, by one thread."""
    body = bodies(head_dim, kv_heads, window)[0]
    tokens = [some_tokens(n) for n in lengths]
    cut = [data.draw(st.integers(0, n - 1)) for n in lengths]
    together, alone = PagedCache(64, page_size, 4), PagedCache(64, page_size)
    pages, own = ([one.reserve(n) for n in lengths] for one in (together, alone))
    first = [(p, t[:c]) for p, t, c in zip(pages, tokens, cut, strict=True) if c]
    if first:
        call(body, together, [Span(p, 0, len(t)) for p, t in first], torch.cat([t for _, t in first]), 4, threads)
    spans = [Span(p, c, len(t) - c) for p, t, c in zip(pages, tokens, cut, strict=True)]
    got = call(body, together, spans, torch.cat([t[c:] for t, c in zip(tokens, cut, strict=True)]), 4, threads)
    wanted = []
    for p, t, c in zip(own, tokens, cut, strict=True):
        wanted += [call(body, alone, [Span(p, i, 1)], t[i : i + 1], 4) for i in range(len(t))][c:]
    assert torch.equal(got, torch.cat(wanted))


def test_numbers_of_any_size_are_kept_as_they_are_rounded():
    """Tiny ones, zeros, huge ones, those halfway between two integers, and those that are not finite."""
    own, exact = bodies(64)
    layer = own.layers[0]
    weight = layer.v.weight.detach().clone()
    try:
        with torch.no_grad():
            layer.v.weight[:32] *= 1e-34
            layer.v.weight[32:64] *= 1e30
            layer.v.weight[64:96] = 0
            layer.v.weight[70] = torch.nan
            layer.v.weight[100] = torch.inf
        [one.refresh(deeply=True) for one in (own, exact)]
        caches = PagedCache(1, 8), PagedCache(1, 8)
        for body, pages in zip((own, exact), caches, strict=True):
            call(body, pages, [Span([0], 0, 8)], some_tokens(8))
        (_, got), (_, given_numbers) = (pages.read(0, [0], 8) for pages in caches)
    finally:
        with torch.no_grad():
            layer.v.weight.copy_(weight)
        [one.refresh(deeply=True) for one in (own, exact)]
    torch.testing.assert_close(got, rounded(given_numbers), rtol=0, atol=0, equal_nan=True)
    blocks = got.flatten(1).unflatten(1, (-1, 32))
    assert (blocks[:, 0] == 0).all() and blocks[:, 1].isfinite().all() and blocks[:, 2:].isnan().all()


def test_pages_are_copied_and_released_with_their_scales():
    body = bodies(48)[0]
    tokens = some_tokens(30)
    first = PagedCache(5, 8, 4)
    table = first.reserve(30)
    call(body, first, [Span(table, 0, 30)], tokens, 4)
    kept = [first.read(layer, table, 30) for layer in range(4)]
    second = PagedCache(6, 8, 4)
    second.reserve(8)
    moved = second.take_over(first, table)
    for layer, pair in enumerate(kept):
        assert all(torch.equal(a, b) for a, b in zip(pair, second.read(layer, moved, 30), strict=True))
    second.copy(moved[1], 0)
    for layer, pair in enumerate(kept):
        for a, page in zip(pair, second.read(layer, [0], 8), strict=True):
            assert torch.equal(page, a[8:16])
    second.release(moved)
    scales = [one[moved] for layer in second.storages for one in layer if one.is_floating_point()]
    assert scales and not any(one.any() for one in scales), "the next row's masked slots are zero, whatever was there"


def test_a_token_takes_two_bytes_a_number_and_two_a_block():
    body = bodies(64)[0]
    pages = PagedCache(2, 8, 4)
    body.structs(pages)
    assert sum(one.nbytes for layer in pages.storages for one in layer) == 4 * 16 * 2 * 2 * (64 * 2 + 2 * 2)
