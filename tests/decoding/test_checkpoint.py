"""The same on a trained checkpoint, with its own tokenizer and its own end-of-text tokens."""

from __future__ import annotations

from functools import partial

import pytest

from tests.decoding.test_sampling import check_equals_plain
from tests.helpers import Always, Schedule, audit_cache, decode, generate
from tests.slow import slow
from tests.target import Target

PROMPTS = [
    "Once upon a time, there was a little girl",
    "The dog",
    "One day, Tom and his mom went to the park. Tom saw a big tree and",
    "",
    "Lily was sad because",
]


def ids(stories, text):
    return stories.tokenizer(text)["input_ids"]


@pytest.fixture(scope="module")
def expected(stories):
    return [generate(stories.model, ids(stories, text), 100) for text in PROMPTS]


@pytest.mark.parametrize("exit_layer", [1, 2, 3, 4])
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 9])
def test_every_exit_layer_and_draft_length_gives_the_tokens_of_generate(
    stories, expected, exit_layer, num_draft_tokens
):
    done = stories.generate(PROMPTS, exit_layer=exit_layer, num_draft_tokens=num_draft_tokens, max_new_tokens=100)
    assert [c.tokens for c in done] == expected
    for text, completion in zip(PROMPTS, done, strict=True):
        whole = stories.tokenizer.decode([*ids(stories, text), *completion.tokens], skip_special_tokens=True)
        assert text + completion.text == whole


@pytest.mark.parametrize("seed", [1, 2, slow(0), slow(3)])
@pytest.mark.parametrize("engine", ["compiled", "views"])
def test_random_schedules_give_the_tokens_of_generate(stories, expected, seed, engine):
    target = Target(stories.model, stories.tokenizer, engine=engine)
    options = {"page_size": (512, 16, 7, 128)[seed], "max_batch_size": 3, "prefill_chunk": 11}
    audit = partial(audit_cache, model=stories.model) if seed < 2 else None
    done = decode(target, PROMPTS, Schedule(seed, 5, longest=8), audit, options, max_new_tokens=60)
    assert [c.tokens for c in done] == [tokens[:60] for tokens in expected]
    assert sum(c.stats.num_accepted_draft_tokens for c in done) > 0


def test_a_text_that_fills_the_context_ends_there(stories):
    prompt = generate(stories.model, ids(stories, PROMPTS[0]), 60)
    prompt = [t for t in (prompt * 12) if t not in stories.eos_token_ids][:490]
    [done] = decode(stories, [prompt], Schedule(0, 5), max_new_tokens=200)
    assert done.tokens == generate(stories.model, prompt, 22)
    assert len(prompt) + len(done.tokens) == stories.stack.context_limit or done.finish_reason == "eos"


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_sampled_stories_are_those_of_plain_decoding(stories, seed):
    options = {"max_new_tokens": 80, "temperature": 0.8, "top_p": 0.95, "seed": [seed, seed + 1, -seed, 7, 8]}
    done = check_equals_plain(stories, PROMPTS, Schedule(seed, 5, longest=8), **options)
    assert sum(c.stats.draft_acceptance_rate for c in done) > 0.4


def test_a_deeper_exit_of_a_trained_model_is_right_more_often(stories):
    rates = []
    for exit_layer in (1, 2, 3, 4):
        done = decode(stories, PROMPTS, Always(exit_layer, 4), max_new_tokens=100)
        rates.append(sum(c.stats.num_accepted_draft_tokens for c in done) / sum(c.stats.num_draft_tokens for c in done))
    assert rates == sorted(rates)
    assert rates[-1] > 2 * rates[0] > 0
