"""Shapes of recordings: large enough for their calls, and few."""

from __future__ import annotations

import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.core import LOOKUP, Plan
from selfspec.executors.cuda.graphs import Storages
from selfspec.executors.cuda.rounds import LEAST_HELD, MAX_PLACES, MAX_WIDTH, SLOTS
from tests.cuda.standin import runner_of
from tests.models import tiny


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
