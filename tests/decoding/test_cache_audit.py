"""After every round keys and values, in every row and layer, are those of a plain forward over all but the last token.

Keys are compared as they are stored: turned by their position, where the family turns them.
"""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.decoding.engine import Engine
from tests.helpers import Always, Schedule, audit_cache, decode, drain, make_prompts
from tests.models import FAMILIES, tiny
from tests.slow import of_each_kind, slow

RAGGED = (12, 7, 1, 20, 33, 2)


def check_cache(target, policy, page_size=64, lengths=RAGGED, max_new_tokens=14, **engine):
    """Audit after every step, prefill steps included; rows leave one by one, so that later rows own scattered pages."""
    limits = [max_new_tokens - 2 * (i % 4) for i in range(len(lengths))]
    settings = {"page_size": page_size, "max_batch_size": 4, "max_cached_tokens": 4 * 64, "prefill_chunk": 16, **engine}
    audit = partial(audit_cache, model=target.model)
    return decode(target, make_prompts(lengths), policy, audit, settings, max_new_tokens=limits)


@pytest.mark.parametrize("family", of_each_kind(FAMILIES))
@pytest.mark.parametrize("page_size", [5, slow(64)])  # 64: schedules that equal generate are audited, too
def test_every_layer_agrees_after_every_round_of_every_family(family, page_size):
    check_cache(tiny(family), Schedule(1, 4), page_size)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    page_size=st.sampled_from([4, 7, 16]),
    prefill_chunk=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_every_layer_agrees_for_any_batch_and_small_pages(lengths, page_size, prefill_chunk, seed):
    check_cache(tiny("llama"), Schedule(seed, 4), page_size, lengths, prefill_chunk=prefill_chunk)


@pytest.mark.parametrize("policy", [Always(1, 5), Always(3, 5), Always(None, 0), Always(2, 0)])
def test_every_layer_agrees_under_one_plan(policy):
    check_cache(tiny("llama"), policy)


def test_a_whole_acceptance_leaves_no_hole_where_its_last_draft_was():
    """The last drafted token's early keys are needed exactly when all of the draft is accepted."""
    target = tiny("llama")
    done = check_cache(target, Always(3, 3))
    assert sum(c.stats.acceptance_histogram[3] for c in done) > 3


def test_pages_of_a_row_may_lie_anywhere():
    target, scattered = tiny("llama"), []
    engine = Engine(target, policy=Schedule(0, 4), max_batch_size=4, max_cached_tokens=160, page_size=4)
    for i, prompt in enumerate(make_prompts([3, 9, 3, 9, 20, 25, 30])):
        engine.submit(prompt, max_new_tokens=4 + 3 * (i % 3))

    def audit(engine):
        audit_cache(engine, target.model)
        scattered.extend(row for row in engine.rows if row.pages[-1] - row.pages[0] != len(row.pages) - 1)

    drain(engine, audit)
    assert scattered


def test_a_long_prompt_prefills_beside_rows_that_decode():
    """More than 32 prompt tokens are attended to apart from the short rows of the same call."""
    target = tiny("gemma2")
    engine = Engine(target, policy=Schedule(0, 4), max_batch_size=4, max_cached_tokens=512, prefill_chunk=50)
    for prompt, limit in zip(make_prompts([4, 90, 3, 70]), (20, 6, 12, 9), strict=True):
        engine.submit(prompt, max_new_tokens=limit)
    drain(engine, partial(audit_cache, model=target.model))
