"""Which tokens end a row: the model's own, none, or more of the caller's; and what ended it."""

from __future__ import annotations

import pytest

from tests.executors.engines import BYTES
from tests.helpers import Always, Schedule, decode, make_prompts
from tests.models import build, tiny
from tests.target import Target
from tests.tokenizers import byte_tokenizer

ENGINES = pytest.mark.parametrize("engine", ["compiled", "views"])
POLICIES = ("plain", Schedule(0, 4), Always(2, 4, num_rounds=99))


@ENGINES
def test_a_row_ends_with_a_stop_token_which_is_told(engine):
    target, [prompt] = tiny("llama", engine=engine), make_prompts([9], seed=1)
    [free] = decode(target, [prompt], "plain", max_new_tokens=20, ignore_eos=True)
    end = free.tokens[7]
    for policy in POLICIES:
        [done] = decode(target, [prompt], policy, max_new_tokens=20, stop_token_ids=(95, end), ignore_eos=True)
        assert done.tokens == free.tokens[: free.tokens.index(end) + 1]
        assert (done.finish_reason, done.stop_reason) == ("stop", end)


@ENGINES
def test_end_of_text_goes_before_a_stop_token_unless_it_is_ignored(engine):
    target, [prompt] = Target(build("llama"), engine=engine), make_prompts([9], seed=1)
    [free] = decode(target, [prompt], "plain", max_new_tokens=20, ignore_eos=True)
    end = free.tokens[5]
    target.model.generation_config.eos_token_id = end
    target.stack.model.generation_config.eos_token_id = end
    for policy in POLICIES:
        [done] = decode(target, [prompt], policy, max_new_tokens=20, stop_token_ids=(end,))
        assert done.tokens == free.tokens[: free.tokens.index(end) + 1]
        assert (done.finish_reason, done.stop_reason) == ("eos", None)
        [done] = decode(target, [prompt], policy, max_new_tokens=20, ignore_eos=True)
        assert (done.tokens, done.finish_reason, done.stop_reason) == (free.tokens, "length", None)
        [done] = decode(target, [prompt], policy, max_new_tokens=20, ignore_eos=True, stop_token_ids=(end,))
        assert (done.finish_reason, done.stop_reason) == ("stop", end)


def test_a_stop_string_is_told_and_a_criterion_is_not():
    target, [prompt] = Target(build("llama", **BYTES), byte_tokenizer()), make_prompts([9], seed=1)
    [free] = decode(target, [prompt], "plain", max_new_tokens=30, ignore_eos=True)
    text = free.text[6:8]
    [done] = decode(target, [prompt], Always(2, 4), max_new_tokens=30, ignore_eos=True, stop=("never there", text))
    assert (done.finish_reason, done.stop_reason) == ("stop", text)
    ends = free.tokens[4]
    options = {"stop": text, "stop_token_ids": (ends,), "ignore_eos": True, "max_new_tokens": 30}
    [done] = decode(target, [prompt], Always(2, 4), **options)
    assert (done.finish_reason, done.stop_reason) == ("stop", ends)
    options = {"stopping_criteria": lambda ids, scores: ids.shape[1] > 12, "ignore_eos": True}
    [done] = decode(target, [prompt], Always(2, 4), max_new_tokens=30, **options)
    assert (done.finish_reason, done.stop_reason) == ("stop", None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids or None, got 5"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be a list of token ids or None, got 'ab'"),
        ({"stop_token_ids": [-1]}, "a token id of stop_token_ids must be a whole number of at least 0, got -1"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ],
)
def test_ends_of_another_kind_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny("llama").generate([[3]], **options)
