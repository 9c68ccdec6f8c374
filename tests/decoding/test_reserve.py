"""Requests that take pages as they grow: the same tokens, more of them at once, and none that waits for ever."""

from __future__ import annotations

import pytest

from selfspec.params import SamplingParams
from tests.executors.requests import engine_of, most_executors, programs
from tests.helpers import audit_cache, make_prompts
from tests.slow import slow

PROMPTS = make_prompts([9, 20, 5, 33, 12])
WAYS = [
    SamplingParams(max_tokens=n, temperature=t, seed=7, ignore_eos=True)
    for n, t in ((100, 0), (30, 1), (90, 1), (60, 0), (7, 1))
]


def decoded(kind, policy, reserve, **options):
    """The tokens of all prompts, and the most of them that were in the batch at once."""
    engine = engine_of(kind, policy, max_num_seqs=5, max_num_cached_tokens=192, **options)
    for at, (prompt, way) in enumerate(zip(PROMPTS, WAYS, strict=True)):
        engine.add_request(str(at), {"prompt_token_ids": prompt}, way, reserve)
    tokens, most, steps = {str(at): [] for at in range(5)}, 0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] += output.outputs[0].token_ids
        most, steps = max(most, engine.num_running), steps + 1
        assert steps < 3000
        if steps % 20 == 0:
            audit_cache(engine)
    assert engine.num_pages_in_use == 0
    return tokens, most


@most_executors
@pytest.mark.parametrize("prefix_cache", [slow(False), True])
def test_no_token_depends_on_how_pages_are_taken(kind, prefix_cache):
    plain, few = decoded(kind, "plain", None)
    assert [len(one) for one in plain.values()] == [100, 30, 90, 60, 7]
    for seed, reserve in enumerate((1, 16, 50)):
        told, most = decoded(kind, programs(seed), reserve, prefix_cache=prefix_cache)
        assert told == plain and (most > few or reserve == 50)
