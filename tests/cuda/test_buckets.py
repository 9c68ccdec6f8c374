"""Shapes of recordings: large enough for their calls, and few."""

from __future__ import annotations

import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.executors.cuda.graphs import Storages
from selfspec.executors.cuda.shapes import LEAST_HELD, NEW, SLOTS, TOKENS, shape_of
from selfspec.model.kv_cache import Span, Tree


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 20)), min_size=1, max_size=140))
def test_a_call_fits_into_its_shape(rows):
    spans = [Span((0,), start, length) for start, length in rows]
    shape, tokens = shape_of(spans, 6000), sum(length for _, length in rows)
    if tokens > TOKENS[-1] or len(rows) > SLOTS[-1] or max(length for _, length in rows) > NEW[-1]:
        assert shape is None
        return
    assert tokens <= shape.tokens < max(2 * tokens, 3)
    assert len(rows) <= shape.slots < 2 * len(rows) + 1
    assert max(length for _, length in rows) <= shape.most_new
    most = max(start + length for start, length in rows)
    assert most <= shape.most_tokens <= min(6000, max(LEAST_HELD, 2 * most - 1))
    assert shape_of([Span((0,), 4, 3, Tree((-1, 0, 0))), *spans], 6000) is None, "trees run eagerly"


def test_pages_are_lent_again_once_their_user_is_gone():
    storages = Storages()
    first, dropped = storages.lend(4, 16)
    assert dropped == [] and storages.of(first) is not None
    storage = storages.of(first)
    second, dropped = storages.lend(2, 16)
    assert dropped == [] and storages.of(second) is not storage, "the first is still in use"
    gone = weakref.ref(first)
    del first
    assert gone() is None
    third, dropped = storages.lend(3, 16)
    assert dropped == [] and storages.of(third) is storage
    assert (third.num_pages, third.num_free_pages, storages.of(third).cache.num_pages) == (3, 3, 4)
    del second, third
    large, dropped = storages.lend(9, 16)
    assert len(dropped) == 2 and storages.of(large).cache.num_pages == 9


def test_pages_lent_again_hold_nothing():
    storages = Storages()
    cache, _ = storages.lend(2, 4)
    keys, _ = cache.layer(0, torch.ones(1, 1, 8), torch.ones(1, 1, 8))
    keys.fill_(float("nan"))
    address = keys.data_ptr()
    del cache
    again, _ = storages.lend(1, 4)
    keys, _ = again.layer(0, torch.ones(1, 1, 8), torch.ones(1, 1, 8))
    assert keys.data_ptr() == address and keys.shape[0] == 2 and not keys.any()
