"""A prediction of the output changes how much is drafted, and no token, on any executor."""

from __future__ import annotations

import pytest

from selfspec.core import LOOKUP
from selfspec.drafting.lookup import Prediction, TextLookup
from selfspec.drafting.ngram_index import CompiledIndex, Index
from selfspec.params import SamplingParams
from tests.executors.requests import RECORDED, engine_of, every_executor, programs
from tests.helpers import Always, Run, make_prompts

WAYS = [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "presence_penalty": 0.5, "stop": "q"}]


def decoded(kind, policy, prompts, ways, predictions):
    run = Run(engine_of(kind, policy))
    given = zip(prompts, ways, predictions, strict=True)
    names = [run.add(prompt, SamplingParams(max_tokens=30, prediction=one, **way)) for prompt, way, one in given]
    run.finish()
    return [run.output(name) for name in names]


@every_executor
def test_no_prediction_changes_a_token(kind):
    prompts = make_prompts([9, 1, 20])
    plain = [one.token_ids for one in decoded(kind, "plain", prompts, WAYS, [None] * 3)]
    edited = [[*one[:7], 1, 2, *one[9:]] for one in plain]
    several = (plain, edited, plain[::-1], [[5] * 40] * 3)
    for seed, predictions in enumerate(several[1:2] if kind in RECORDED else several):
        for policy in (programs(seed, kind), Always(LOOKUP, 6)):
            assert [one.token_ids for one in decoded(kind, policy, prompts, WAYS, predictions)] == plain


@pytest.mark.parametrize("kind", ["eager", "cpu"])
def test_a_right_prediction_is_drafted_from_the_first_token_on(kind):
    prompts = make_prompts([9])
    [plain] = decoded(kind, "plain", prompts, [{}], [None])
    [told] = decoded(kind, Always(LOOKUP, 6, num_rounds=40), prompts, [{}], [plain.token_ids])
    [none] = decoded(kind, Always(LOOKUP, 6, num_rounds=40), prompts, [{}], [None])
    assert told.token_ids == none.token_ids == plain.token_ids
    assert told.stats.num_accepted_draft_tokens >= 24 > none.stats.num_accepted_draft_tokens


@pytest.mark.parametrize("make", [lambda most, size: Index(most), CompiledIndex])
def test_matches_are_found_in_the_prediction_and_in_what_is_written(make):
    """The prompt is 1 2 3; after it, 4 5 6 7 is expected."""
    text = [1, 2, 3]
    lookup = TextLookup(text, 128, make, Prediction([2, 3, 4, 5, 6, 7], 2))
    assert lookup.draft(9) == ([4, 5, 6, 7], 2, 0)
    text += [4, 9]
    assert lookup.draft(9) == ([], 0, 0)
    text += [5]
    assert lookup.draft(2) == ([6, 7], 1, 0) and len(lookup) == 6
    text += [1, 2]
    assert lookup.draft(3) == ([3, 4, 9], 2, 0)
    assert lookup.take_tally().num_tokens == 8
