"""The calls of 0.1's README, as they stood there: they work until 0.3."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

import selfspec
from selfspec import LLM, SamplingParams, SpeculativeConfig

PROMPTS = ["def mean(values):\n", "class Stack:\n"]


@pytest.fixture(scope="module")
def target():
    with pytest.warns(DeprecationWarning, match=r"selfspec.load goes in 0.3; use selfspec.LLM"):
        return selfspec.load("demo", device="cpu")


@pytest.fixture(scope="module")
def llm():
    return LLM("demo", device="cpu", speculative=SpeculativeConfig(policy="plain"))


def texts(completions):
    return [completion.text for completion in completions]


def test_generate_with_transformers_keywords(target, llm):
    done = target.generate(PROMPTS, max_new_tokens=24, temperature=0.8, seed=7)
    wanted = llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0.8, seed=7))
    assert texts(done) == [output.outputs[0].text for output in wanted]
    assert all(completion.stats.mean_acceptance_length >= 1 for completion in done)
    assert done[0].finish_reason == "length" and len(done[0].tokens) == 24


@pytest.mark.parametrize(
    "drafting",
    [{"policy": "plain"}, {"policy": "adaptive", "drafts": ["lookup"]}, {"exit_layer": 4, "num_draft_tokens": 3}],
)
def test_how_drafts_are_made_by_keyword(target, llm, drafting):
    done = target.generate(PROMPTS, max_new_tokens=24, **drafting)
    wanted = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert texts(done) == [output.outputs[0].text for output in wanted]


def test_options_of_one_prompt_each_and_a_generation_config(target, llm):
    done = target.generate(PROMPTS, max_new_tokens=[5, 9], seed=[1, 2], temperature=1.0, generation_config=False)
    assert [len(completion.tokens) for completion in done] == [5, 9]
    config = GenerationConfig(max_new_tokens=4)
    assert [len(completion.tokens) for completion in target.generate(PROMPTS, generation_config=config)] == [4, 4]
    stop = target.generate(PROMPTS[0], max_new_tokens=60, stop="\n", stopping_criteria=lambda ids, scores: False)
    assert stop[0].finish_reason == "stop" and "\n" not in stop[0].text


def test_stream_gives_rounds(target):
    rounds = list(target.stream(PROMPTS, max_new_tokens=16, max_batch_size=2, exact=True))
    done = target.generate(PROMPTS, max_new_tokens=16)
    assert "".join(row.text for round_ in rounds for row in round_.rows if row.request_id == 0) == done[0].text
    assert all(round_.seconds.total >= 0 for round_ in rounds)


def test_an_engine_with_submit_step_and_cancel(target):
    engine = selfspec.Engine(target, max_batch_size=2, max_cached_tokens=512)
    first, second = (engine.submit(prompt, max_new_tokens=16) for prompt in PROMPTS)
    engine.cancel(second)
    rounds = [*engine.step(), *engine.run()]
    done = {row.request_id: row.completion for round_ in rounds for row in round_.rows if row.completion}
    assert done[first].tokens == target.generate(PROMPTS[0], max_new_tokens=16)[0].tokens
    assert done[second].finish_reason == "cancelled"


def test_generate_of_transformers_with_custom_generate(target):
    from selfspec.hf import SelfSpeculative

    inputs = target.tokenizer(PROMPTS[:1], return_tensors="pt")
    speculate = SelfSpeculative(exit_layer=4, num_draft_tokens=4)
    options = {"max_new_tokens": 16, "do_sample": False}
    output = target.model.generate(**inputs, custom_generate=speculate, **options)
    assert torch.equal(output, target.model.generate(**inputs, **options))


def test_exit_heads_learn_meanwhile(target):
    done = target.generate(PROMPTS, max_new_tokens=16, exit_layer=3, learn=True)
    assert texts(done) == texts(target.generate(PROMPTS, max_new_tokens=16, policy="plain"))


def test_what_there_never_was_is_named(target):
    with pytest.raises(TypeError, match=r"there is no option 'temprature'; the options are .*max_batch_size, .*top_k"):
        target.generate(PROMPTS, temprature=1.0)
