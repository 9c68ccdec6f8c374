"""Shapes of recordings: large enough for their calls, and few."""

from __future__ import annotations

import logging
import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec import SamplingParams
from selfspec.core import LOOKUP, Plan
from selfspec.decoding.prefix_store import PrefixStore
from selfspec.executors.cuda.graphs import Storages
from selfspec.executors.cuda.rounds import LEAST_HELD, MAX_PLACES, MAX_WIDTH, SLOTS
from tests.cuda.standin import runner_of, with_runner
from tests.helpers import Always, engine_of, make_prompts, request
from tests.models import build, tiny
from tests.target import Target


@given(st.integers(1, 300), st.integers(1, 5990), st.integers(0, 20), st.sampled_from([None, LOOKUP, 2]))
def test_a_round_fits_into_its_key(num_rows, most, longest, exit_layer):
    """Longer drafts than a recording holds are cut; more rows than it drafts for decode plainly."""
    runner = runner_of(tiny("llama").split, max_rows=32)
    key = runner._round_key(num_rows, most, longest if exit_layer is not None else 0, 6000, Plan(exit_layer, (0,)))
    if num_rows > SLOTS[-1]:
        assert key is None
        return
    assert num_rows <= key.slots < 2 * num_rows + 1
    drafted = 0 if exit_layer is None or num_rows > 32 else min(longest, MAX_WIDTH - 1, MAX_PLACES // num_rows - 1)
    assert drafted < key.width <= max(2 * drafted, 1) and (key.exit_layer == 0 or key.width == drafted + 1)
    assert key.has_states == (key.width == 1), "what probes read costs plain rounds nothing"
    held = most + key.width - 1
    assert min(6000, held) <= key.most_tokens <= min(6000, max(LEAST_HELD, 4 * held - 1))


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


def written(runner, num_pages):
    """A cache of so many pages of 16 tokens, whose layers have written."""
    cache = runner.new_cache(num_pages, 16)
    cache.layer(0, torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    return cache


def test_keys_and_values_that_grow_take_twice_the_memory_at_once():
    runner = runner_of(tiny("llama").split)
    for wanted, held in ((4, 4), (6, 8), (7, 8), (8, 8), (30, 30), (31, 60)):
        cache = written(runner, wanted)
        assert (cache.num_pages, runner.storages.of(cache).cache.num_pages) == (wanted, held)
        del cache


def test_they_take_what_is_needed_where_memory_is_short(monkeypatch):
    runner = runner_of(tiny("llama").split)
    cache = written(runner, 4)
    twice = 8 * sum(one.nbytes // 4 for one in cache.storages[0])
    monkeypatch.setattr(runner.split, "device", torch.device("cuda"))
    for free, pages in ((2 * twice, 8), (2 * twice - 1, 6)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 0))
        assert runner.pages_in_place_of(cache, 6) == pages
    assert [runner.pages_in_place_of(cache, pages) for pages in (3, 4, 8, 9)] == [3, 4, 8, 9]


def test_recordings_that_read_other_memory_are_told_once(caplog):
    target = with_runner(Target(build("llama")))
    with caplog.at_level(logging.INFO, "selfspec"):
        for tokens in (64, 96, 128, 128):
            engine = engine_of(target, Always(None, 0), max_num_seqs=1, max_num_cached_tokens=tokens, page_size=16)
            engine.add_request("a", request(make_prompts([9])[0], SamplingParams(max_tokens=8)))
            while engine.has_unfinished_requests():
                engine.step()
            del engine
    told = [one.message for one in caplog.records if "other memory" in one.message]
    assert told == ["keys and values of 128 tokens have other memory; recordings made again at their next use: 1"]
    assert target.split.runner.graphs.num_recorded == 2


def test_a_prefix_cache_that_grows_keeps_its_place_for_the_next_calls():
    target, store = with_runner(Target(build("llama"))), PrefixStore()
    held = []
    for tokens in (64, 96, 112, 128):
        prefix = store.take(target.split, tokens, 64, 16)
        prefix.cache.layer(0, torch.ones(1, 2, 8), torch.ones(1, 2, 8))
        held.append(prefix.cache)
        store.keep(target.split, prefix, 64)
    assert [one.num_pages for one in held] == [4, 8, 8, 8] and held[1] is held[2] is held[3]
