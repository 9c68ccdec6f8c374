"""Processors that look back see, at every position, the prefix of that position: content and the drafts before it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from selfspec.decoding.engine import Engine
from tests.decoding.test_greedy import check_equals_generate
from tests.decoding.test_sampling import check_equals_plain
from tests.helpers import Always, Schedule, decode, drain, generate, make_prompts
from tests.models import EOS, tiny
from tests.slow import slow

PROCESSORS = {
    "a repetition penalty": lambda length: [RepetitionPenaltyLogitsProcessor(1.6)],
    "no repeated bigram": lambda length: [NoRepeatNGramLogitsProcessor(2)],
    "at least eleven new tokens": lambda length: [MinNewTokensLengthLogitsProcessor(length, 11, [EOS, *range(40)])],
    "several": lambda length: [
        SuppressTokensLogitsProcessor([5, 9], device="cpu"),
        RepetitionPenaltyLogitsProcessor(1.3),
        NoRepeatNGramLogitsProcessor(3),
        MinNewTokensLengthLogitsProcessor(length, 5, [EOS]),
    ],
}
RAGGED = (12, 7, 1, 20)


def check_processors(target, processors, schedules=3):
    """Greedy tokens under the processors equal generate's, and somewhere differ from those without."""
    changed = False
    for prompt in make_prompts(RAGGED, seed=1):
        made = tuple(processors(len(prompt)))
        expected = generate(target.model, prompt, 20, made)
        changed |= expected != generate(target.model, prompt, 20)
        for seed in range(schedules):
            [done] = decode(target, [prompt], Schedule(seed, 4), max_new_tokens=20, logits_processor=made)
            assert done.tokens == expected
    assert changed


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("family", ["phi", slow("gpt_neox")])  # these two like to repeat themselves
def test_processors_that_look_back_equal_generate(family, name):
    check_processors(tiny(family), PROCESSORS[name])


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_batch_with_processors_equals_generate(lengths, seed):
    made = PROCESSORS["several"](0)[:3]
    check_equals_generate(tiny("qwen3"), make_prompts(lengths, seed), Schedule(seed, 4), 16, processors=made)


def test_rows_with_and_without_processors_share_a_batch():
    target, prompts = tiny("llama"), make_prompts(RAGGED, seed=1)
    made = [PROCESSORS["a repetition penalty"](0), [], PROCESSORS["no repeated bigram"](0), []]
    expected = [generate(target.model, prompt, 20, own) for prompt, own in zip(prompts, made, strict=True)]
    for seed in range(4):
        done = decode(target, prompts, Schedule(seed, 4), max_new_tokens=20, logits_processor=[tuple(m) for m in made])
        assert [c.tokens for c in done] == expected


@pytest.mark.parametrize("seed", range(3))
def test_sampling_with_processors_equals_plain_decoding(seed):
    made = tuple(PROCESSORS["several"](0)[:3])
    options = {"max_new_tokens": 16, "temperature": 0.9, "top_p": 0.9, "seed": 3}
    check_equals_plain(tiny("llama"), make_prompts(RAGGED), Schedule(seed, 4), logits_processor=made, **options)


def test_a_processor_is_shown_each_positions_own_prefix():
    target, [prompt] = tiny("llama"), make_prompts([6], seed=1)
    seen = []

    def watch(input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        seen.append(tuple(input_ids[0].tolist()))
        return scores

    [done] = decode(target, [prompt], Always(3, 4), max_new_tokens=12, logits_processor=watch)
    whole = (*prompt, *done.tokens)
    for n in range(len(prompt), len(whole)):  # every kept token was picked after its own prefix
        assert whole[:n] in seen


def test_a_processor_cannot_spoil_the_logits_it_is_given():
    target, prompts = tiny("llama"), make_prompts(RAGGED, seed=1)

    def spoil(input_ids, scores):
        kept = scores.clone()
        scores.zero_()
        return kept

    done = decode(target, prompts, Schedule(0, 4), max_new_tokens=10, logits_processor=spoil, keep_logits=True)
    assert [c.tokens for c in done] == [generate(target.model, prompt, 10) for prompt in prompts]
    assert all(torch.stack(c.logits).std() > 0 for c in done)


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda ids, logits: logits[0], r"a Tensor of shape \[96\]"),
        (lambda ids, logits: logits[:, :50], r"a Tensor of shape \[1, 50\]"),
        (lambda ids, logits: logits.numpy(), "a ndarray of"),
        (lambda ids, logits: None, "a NoneType of"),
    ],
)
def test_a_processor_that_returns_no_logits_ends_its_own_row_alone(wrong, got):
    target = tiny("llama")
    first, second = make_prompts([9, 4])
    engine = Engine(target, policy=Schedule(1, 4), max_batch_size=2)
    spoiled = engine.submit(first, max_new_tokens=12, logits_processor=wrong)
    sound = engine.submit(second, max_new_tokens=12)
    with pytest.raises(ValueError, match=r"^logits_processor must return a tensor of logits \[1, 96\], got " + got):
        drain(engine)
    completions = drain(engine).completions
    assert completions[spoiled].finish_reason == "cancelled"
    assert completions[sound].tokens == generate(target.model, second, 12)


def test_a_processor_of_another_dtype_does_not_change_its_neighbours():
    first, second = make_prompts([9, 4])
    options = {"max_new_tokens": 12, "keep_logits": True}
    engine = Engine(tiny("llama"), policy=Schedule(1, 4), max_batch_size=2)
    engine.submit(first, logits_processor=lambda ids, logits: logits.double(), **options)
    engine.submit(second, **options)
    assert {score.dtype for done in drain(engine).completions.values() for score in done.scores} == {torch.float32}
