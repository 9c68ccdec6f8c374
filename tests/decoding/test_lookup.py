"""Drafts by lookup change no token, whatever they hold; plain drafts of them are in `tests/executors`."""

from __future__ import annotations

import pytest

from selfspec.core import LOOKUP, Draft
from selfspec.drafting import lookup
from selfspec.drafting.lookup import TextLookup
from selfspec.params import SamplingParams
from tests.decoding.test_greedy import check_equals_generate
from tests.decoding.test_processors import PROCESSORS
from tests.decoding.test_sampling import check_equals_plain
from tests.helpers import Always, Schedule, decode, generate, make_prompts, request
from tests.models import EOS, tiny

VOCAB = 96


def echoes(lengths, seed=0):
    """Prompts that say everything twice."""
    return [prompt + prompt for prompt in make_prompts(lengths, seed)]


def wrong(self, num_tokens, honest=TextLookup.draft):
    """Never what followed."""
    draft = honest(self, num_tokens)
    return Draft([(token + 1) % VOCAB for token in draft.token_ids], draft.match_length)


def all_equal(self, num_tokens):
    return Draft([VOCAB - 1] * num_tokens, 1)


def ends(self, num_tokens):
    return Draft([EOS] * num_tokens, 9)


def ends_later(self, num_tokens, honest=TextLookup.draft):
    draft = honest(self, num_tokens)
    return Draft((draft.token_ids[:2] + [EOS] * num_tokens)[:num_tokens], draft.match_length)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "qwen3_moe", "ministral", "gemma2", "gpt_oss"])
def test_drafts_by_lookup_equal_generate(family):
    done = check_equals_generate(tiny(family), echoes((12, 7, 1, 20), seed=1), Always(LOOKUP, 5), 30)
    assert sum(one.stats.num_draft_tokens for one in done) > 0
    assert sum(one.stats.num_plain_steps for one in done) > 0  # rows without a match draft nothing


@pytest.mark.parametrize("adversary", [wrong, all_equal, ends, ends_later])
def test_drafts_of_an_adversary_change_no_token(adversary, monkeypatch):
    monkeypatch.setattr(TextLookup, "draft", adversary)
    target, prompts = tiny("mistral"), echoes((9, 3, 14), seed=2)
    params = [SamplingParams(max_tokens=24, seed=i, temperature=(0.0, 0.7, 1.0)[i]) for i in range(3)]
    for policy in (Always(LOOKUP, 6), Schedule(0, 4)):
        done = check_equals_generate(target, prompts, policy, 24)
        assert sum(one.stats.num_draft_tokens for one in done) > 0
        check_equals_plain(target, prompts, policy, params)
    [prompt] = make_prompts([9], seed=5)
    free = generate(target.model, prompt, 14)
    for end in {*free[3:9]}:  # an end of text inside a draft ends the row where the target says so
        asked = request(prompt, SamplingParams(max_tokens=14), eos_token_ids=frozenset([end]))
        [done] = decode(target, [asked], Always(LOOKUP, 5))
        assert (done.token_ids, done.finish_reason) == (free[: free.index(end) + 1], "stop")


def test_processors_see_the_prefix_of_every_draft(monkeypatch):
    [prompt] = echoes([7])
    made = PROCESSORS["several"](len(prompt))
    for adversary in (TextLookup.draft, all_equal):
        monkeypatch.setattr(TextLookup, "draft", adversary)
        check_equals_generate(tiny("phi"), [prompt], Always(LOOKUP, 5), 24, processors=made)


@pytest.mark.parametrize(("exit_layer", "count"), [(2, 0), (None, 0), (LOOKUP, 1)])
def test_the_index_is_made_when_it_is_first_asked_for(exit_layer, count, monkeypatch):
    made = []
    monkeypatch.setattr(lookup, "TextLookup", lambda content, **more: made.append(content) or TextLookup(content))
    decode(tiny("llama"), echoes([9]), Always(exit_layer, 4), SamplingParams(max_tokens=8))
    assert len(made) == count
