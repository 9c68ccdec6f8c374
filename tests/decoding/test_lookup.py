"""Drafts by lookup change no token, whatever they guess."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control.plan import LOOKUP, Plan
from selfspec.decoding.engine import Engine
from selfspec.drafting import row_lookup as sources
from selfspec.drafting.prompt_lookup import Guess, Lookup
from tests.decoding.test_greedy import check_ends_at_eos, check_equals_generate
from tests.decoding.test_processors import PROCESSORS
from tests.decoding.test_sampling import check_equals_plain
from tests.helpers import Adversary, Always, Schedule, decode, make_prompts
from tests.models import EOS, tiny
from tests.slow import slow

SLIDING = ["mistral", "ministral", "gemma2", "gpt_oss"]
VOCAB = 96


def echoes(lengths, seed=0):
    """Prompts that say everything twice."""
    return [prompt + prompt for prompt in make_prompts(lengths, seed)]


def seeded(count):
    return {"temperature": [(0.0, 0.7, 1.0)[i % 3] for i in range(count)], "seed": list(range(count))}


def wrong(self, num_tokens, honest=Lookup.draft):
    """Never what followed."""
    guess = honest(self, num_tokens)
    return Guess([(token + 1) % VOCAB for token in guess.tokens], guess.match)


def all_equal(self, num_tokens):
    return Guess([VOCAB - 1] * num_tokens, 1)


def ends(self, num_tokens):
    return Guess([EOS] * num_tokens, 9)


def ends_later(self, num_tokens, honest=Lookup.draft):
    guess = honest(self, num_tokens)
    return Guess((guess.tokens[:2] + [EOS] * num_tokens)[:num_tokens], guess.match)


ADVERSARIES = [Lookup.draft, wrong, all_equal, ends, ends_later]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", *SLIDING])
@pytest.mark.parametrize("longest", [5, slow(1), slow(12)])
def test_drafts_by_lookup_equal_generate(family, longest):
    done = check_equals_generate(tiny(family), echoes((12, 7, 1, 20), seed=1), Always(LOOKUP, longest), 30)
    assert sum(c.stats.num_draft_tokens for c in done) > 0
    assert sum(c.stats.num_plain_steps for c in done) > 0  # rows without a match draft nothing


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_drafts_of_an_adversary_change_no_token(family, adversary, monkeypatch):
    monkeypatch.setattr(Lookup, "draft", adversary)
    target, prompts = tiny(family), echoes((9, 3, 14), seed=2)
    for policy in (Always(LOOKUP, 6), Schedule(0, 4), Schedule(1, 4)):
        done = check_equals_generate(target, prompts, policy, 24)
        assert sum(c.stats.num_draft_tokens for c in done) > 0
        check_equals_plain(target, prompts, policy, max_new_tokens=24, **seeded(3))


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_an_end_of_text_inside_a_draft_ends_the_row_where_the_target_says_so(adversary, monkeypatch):
    monkeypatch.setattr(Lookup, "draft", adversary)
    check_ends_at_eos(policies=(Always(LOOKUP, 5), Schedule(1, 4)))


@pytest.mark.parametrize("adversary", [Lookup.draft, all_equal])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_see_the_prefix_of_every_guess(name, adversary, monkeypatch):
    monkeypatch.setattr(Lookup, "draft", adversary)
    target = tiny("phi")
    [prompt] = echoes([7])
    made = tuple(PROCESSORS[name](len(prompt)))
    check_equals_generate(target, [prompt], Always(LOOKUP, 5), 24, processors=made)


@given(
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=8),
    max_new_tokens=st.integers(1, 30),
    seed=st.integers(0, 10_000),
    family=st.sampled_from(["llama", "ministral"]),
)
def test_any_batch_of_lookups_and_early_exits_equals_plain_decoding(lengths, max_new_tokens, seed, family):
    target, prompts, policy = tiny(family), echoes(lengths, seed), Adversary(seed, 4)
    check_equals_generate(target, prompts, policy, max_new_tokens)
    check_equals_plain(target, prompts, policy, max_new_tokens=max_new_tokens, **seeded(len(lengths)))


@pytest.mark.parametrize(("exit_layer", "count"), [(2, 0), (None, 0), (LOOKUP, 1)])
def test_the_index_is_made_when_it_is_first_asked_for(exit_layer, count, monkeypatch):
    made = []
    monkeypatch.setattr(sources, "Lookup", lambda content: made.append(content) or Lookup(content))
    decode(tiny("llama"), echoes([9]), Always(exit_layer, 4), max_new_tokens=8)
    assert len(made) == count


@pytest.mark.parametrize("exit_layer", [-1, 4])
def test_exit_layers_below_the_lookup_and_beyond_the_model_are_refused(exit_layer):
    engine = Engine(tiny("llama"), policy=Always(exit_layer, 2))
    engine.submit([5, 6, 7], max_new_tokens=8)
    with pytest.raises(ValueError, match=r"a plan's exit_layer must be None or lie in 0..3 \(0: lookup\), got"):
        engine.step()


def test_a_draft_by_lookup_has_no_confidences():
    plan = Plan(LOOKUP, (3,), min_confidence=0.5, keep_confidence=True)
    assert not plan.reads_confidence
