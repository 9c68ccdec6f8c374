"""Pages: written by position, owned by one row at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.model.kv_cache import PackedRows, PagedCache, Span


def some(tokens, seed=0):
    return torch.randn(1, 2, tokens, 3, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5), st.randoms(use_true_random=False))
def test_pages_are_never_owned_twice_and_none_is_lost(needs, page_size, rng):
    cache, owned = PagedCache(6, page_size), []
    for need in needs:
        free = cache.num_free_pages
        pages = cache.reserve(need)
        count = -(-need // page_size)
        assert (pages is None) == (count > free)
        if pages is not None:
            assert len(pages) == count
            owned.append(pages)
        held = [page for pages in owned for page in pages]
        assert len({*held}) == len(held) == 6 - cache.num_free_pages and {*held} <= {*range(6)}
        if owned and rng.random() < 0.4:
            cache.release(owned.pop(rng.randrange(len(owned))))
    for pages in owned:
        cache.release(pages)
    assert sorted(cache.reserve(6 * page_size)) == list(range(6)) and cache.num_free_pages == 0


def test_the_lowest_free_pages_are_given_first():
    cache = PagedCache(5, 2)
    assert cache.reserve(4) == [0, 1]
    assert cache.reserve(2) == [2]
    cache.release([0, 1])
    assert cache.reserve(6) == [0, 1, 3]
    assert cache.reserve(3) is None
    assert cache.num_free_pages == 1


def test_a_page_released_twice_is_noticed():
    cache = PagedCache(2, 2)
    pages = cache.reserve(1)
    cache.release(pages)
    with pytest.raises(AssertionError, match="page 0 was released twice"):
        cache.release(pages)


@pytest.mark.parametrize(("pages", "size"), [(0, 4), (4, 0)])
def test_a_cache_of_nothing_is_refused(pages, size):
    with pytest.raises(ValueError, match=f"got {pages} pages of {size}"):
        PagedCache(pages, size)


@pytest.mark.parametrize("tables", [([0], [2]), ([2, 0], [1, 3]), ([3, 1, 0], [2])])
def test_keys_are_read_back_from_where_their_positions_say(tables):
    size = 9 if len(tables[0]) == 1 else 3
    cache = PagedCache(4, size)
    first, second = some(5, 1), some(2, 2)
    later = some(3, 3)
    packed = PackedRows(cache, [Span(tables[0], 0, 5), Span(tables[1], 0, 2)])
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert packed.num_tokens == 7
    both = torch.cat([first, second], 2)
    packed.update(both, both + 1, 0)
    once_more = PackedRows(cache, [Span(tables[0], 3, 3)])  # positions 3 and 4 are written over
    assert once_more.positions.tolist() == [[3, 4, 5]]
    once_more.update(later, later + 1, 0)
    keys, values = cache.read(0, tables[0], 6)
    assert torch.equal(keys, torch.cat([first[:, :, :3], later], 2)[0].transpose(0, 1))
    assert torch.equal(values, keys + 1)
    assert torch.equal(cache.read(0, tables[1], 2)[0], second[0].transpose(0, 1))


def test_releasing_zeroes_what_a_row_has_written_on_any_of_its_pages():
    cache = PagedCache(4, 8)
    pages = cache.reserve(20)
    keys, values = cache.layer(0, torch.ones(1, 2, 4), torch.ones(1, 2, 4))
    for storage in (keys, values):
        storage[pages] = 1
        storage[pages[-1], 4:] = 0
    cache.release(pages, 20)
    assert not keys.any() and not values.any()
    [page] = cache.reserve(5)
    keys[page, :5] = 1
    cache.release([page], 5)
    assert not keys.any()
