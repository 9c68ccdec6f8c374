"""Greedy decoding in fp32 is transformers' own `generate`, token for token, whatever the schedule."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.decoding.request import Request
from selfspec.model.stack import Stack
from tests.helpers import Always, Schedule, audit_cache, decode, generate, make_prompts
from tests.models import EAGER_ONLY, FAMILIES, build, tiny
from tests.slow import of_each_kind, slow
from tests.target import Target

RAGGED = (12, 7, 1, 20)


def check_equals_generate(target, prompts, policy, max_new_tokens=16, audit=True, processors=(), **engine):
    """Tokens equal generate's; and, after every round, keys and values equal a plain forward's."""
    expected = [generate(target.model, prompt, max_new_tokens, processors) for prompt in prompts]
    check = partial(audit_cache, model=target.model) if audit else None
    options = {"max_new_tokens": max_new_tokens, "logits_processor": tuple(processors)}
    done = decode(target, prompts, policy, check, engine, **options)
    assert [completion.tokens for completion in done] == expected
    return done


# Whether a model itself would attend eagerly changes the judge alone.
BODIES = [(family, "eager" if family in EAGER_ONLY else "sdpa") for family in FAMILIES]
EAGER = [("llama", "eager"), *(slow(family, "eager") for family in FAMILIES if family not in {"llama", *EAGER_ONLY})]


@pytest.mark.parametrize(("family", "attn"), [*BODIES, *EAGER])
@pytest.mark.parametrize("seed", [0, slow(1)])
def test_random_schedules_of_every_family_equal_generate(family, attn, seed):
    check_equals_generate(tiny(family, attn), make_prompts(RAGGED, seed=1), Schedule(seed, 4))


@pytest.mark.parametrize("family", of_each_kind(FAMILIES))
def test_every_exit_layer_of_every_family_equals_generate(family):
    target, prompts = tiny(family), make_prompts(RAGGED, seed=1)
    for exit_layer in (1, 2, 3):
        check_equals_generate(target, prompts, Always(exit_layer, 4), audit=False)


def ragged_batches(most_rows=8, longest=24):
    return st.lists(st.integers(1, longest), min_size=1, max_size=most_rows)


SCHEDULES = {
    "lengths": ragged_batches(),
    "max_new_tokens": st.integers(1, 20),
    "page_size": st.sampled_from([1, 4, 7, 16, 64]),
    "prefill_chunk": st.sampled_from([1, 3, 10, 512]),
    "max_batch_size": st.integers(1, 8),
    "seed": st.integers(0, 10_000),
}


def check_any_batch(family, lengths, max_new_tokens, seed, **engine):
    target = tiny(family)
    prompts = make_prompts(lengths, seed)
    check_equals_generate(target, prompts, Schedule(seed, 4), max_new_tokens, max_cached_tokens=512, **engine)


@given(**SCHEDULES)
def test_any_batch_and_any_schedule_equal_generate(**case):
    check_any_batch("llama", **case)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 4, 5, 6, 9, 10])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_row_emits_exactly_its_limit_around_the_draft_length_of_four(family, max_new_tokens):
    target, prompts = tiny(family), make_prompts(RAGGED, seed=4)
    done = check_equals_generate(target, prompts, Always(2, 4), max_new_tokens)
    assert {len(c.tokens) for c in done} == {max_new_tokens}
    assert {c.finish_reason for c in done} == {"length"}


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("short", [1, 2, 5])
def test_a_row_ends_where_the_context_does(family, short):
    target = tiny(family)
    limit = target.stack.context_limit
    [prompt] = make_prompts([limit - short], seed=4)
    [expected] = [generate(target.model, prompt, short)]
    for policy in (Always(None, 0), Always(2, 4), Schedule(0, 4)):
        [done] = decode(target, [prompt], policy, max_new_tokens=50)
        assert (done.tokens, done.finish_reason) == (expected, "length")
        assert len(prompt) + len(done.tokens) == limit


def test_rows_with_different_limits_end_apart():
    target, prompts = tiny("llama"), make_prompts([5] * 6, seed=2)
    limits = [1, 2, 3, 7, 11, 20]
    expected = [generate(target.model, prompt, n) for prompt, n in zip(prompts, limits, strict=True)]
    done = decode(target, prompts, Schedule(3, 4), partial(audit_cache, model=target.model), max_new_tokens=limits)
    assert [c.tokens for c in done] == expected


def check_ends_at_eos(family="llama", policies=None):
    """Whatever index an end-of-text token has in its block, nothing follows it, and it is the last token kept."""
    target = tiny(family)
    [prompt] = make_prompts([9], seed=5)
    free = generate(target.model, prompt, 14)
    firsts = {token: at for at, token in reversed(list(enumerate(free)))}
    assert len(firsts) > 6
    for token, at in firsts.items():
        for policy in policies or (Always(3, 5), Always(2, 4), Schedule(1, 4), Always(None, 0)):
            request = Request(prompt, 14, eos=frozenset([token]))
            other = Request(make_prompts([4], seed=6)[0], 14)  # a neighbour that goes on
            done = decode(target, [request, other], policy)
            assert done[0].tokens == free[: at + 1]
            assert done[0].finish_reason == "eos"
            assert done[1].tokens == generate(target.model, other.prompt, 14)


def test_an_end_of_text_inside_a_block_ends_the_row_there():
    check_ends_at_eos()


def test_several_end_of_text_tokens_end_at_the_first_as_generate_does():
    model = build("llama")
    [prompt] = make_prompts([9], seed=5)
    free = generate(model, prompt, 14)
    model.generation_config.eos_token_id = [free[8], free[5]]
    model.generation_config.pad_token_id = free[5]
    target = Target(model)
    assert target.eos_token_ids == {free[8], free[5]}
    [done] = target.generate([prompt], exit_layer=3, num_draft_tokens=6, max_new_tokens=14)
    assert done.tokens == generate(model, prompt, 14) == free[: free.index(free[5]) + 1]


def test_prompts_that_hold_the_pad_and_end_of_text_token_are_read_like_any_other():
    target = tiny("llama")
    eos = next(iter(target.eos_token_ids))
    prompts = [
        [eos, *prompt[:3], eos, eos, *prompt[3:], *[eos] * i] for i, prompt in enumerate(make_prompts([5, 8, 3]))
    ]
    check_equals_generate(target, prompts, Schedule(2, 4))


def with_idle_later_layers():
    """A model whose layers after the first add nothing: every exit is the target."""
    model = build("llama")
    for layer in model.model.layers[1:]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return Target(model)


@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_drafts_that_are_always_right_are_all_accepted(exit_layer):
    target = with_idle_later_layers()
    done = check_equals_generate(target, make_prompts(RAGGED, seed=1), Always(exit_layer, 4), 16)
    for completion in done:  # rounds of 5, 5, 5 and a last one with no room for a draft
        assert completion.stats.acceptance_histogram == {4: 3}
        assert completion.stats.num_plain_steps == 1
        assert completion.stats.draft_acceptance_rate == 1
        assert completion.stats.mean_acceptance_length == 5
        assert completion.stats.acceptance_by_position() == [(1.0, 1.0)] * 4
    check_equals_generate(target, make_prompts(RAGGED, seed=1), Schedule(exit_layer, 4))


def test_drafts_that_are_always_wrong_are_all_rejected(monkeypatch):
    honest = Stack.logits

    def adversary(self, hidden, exit_layer=None):
        logits = honest(self, hidden, exit_layer)
        return logits if exit_layer is None else -logits

    target, prompts = tiny("llama", engine="views"), make_prompts(RAGGED, seed=1)
    expected = [generate(target.model, prompt, 16) for prompt in prompts]
    monkeypatch.setattr(Stack, "logits", adversary)
    for policy in (Always(1, 4), Always(3, 6), Schedule(0, 4)):
        done = decode(target, prompts, policy, partial(audit_cache, model=target.model), max_new_tokens=16)
        assert [c.tokens for c in done] == expected
        assert all(c.stats.num_accepted_draft_tokens == 0 < c.stats.num_draft_tokens for c in done)
        assert all(c.stats.mean_acceptance_length == 1 for c in done)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 1.01])
def test_drafts_that_stop_when_unsure_change_nothing(confidence):
    target, prompts = tiny("qwen3"), make_prompts(RAGGED, seed=1)
    done = check_equals_generate(target, prompts, Always(2, 6, confidence), 20)
    sure = check_equals_generate(target, prompts, Always(2, 6), 20)
    assert sum(c.stats.num_draft_tokens for c in done) < sum(c.stats.num_draft_tokens for c in sure)
    if confidence > 1:  # a row that is never sure drafts one token a round, and keeps it
        assert {d for c in done for d in c.stats.acceptance_histogram_by_draft_length} == {1}


def test_plain_decoding_is_the_same_code_with_nothing_drafted():
    done = check_equals_generate(tiny("llama"), make_prompts(RAGGED, seed=1), "plain")
    for completion in done:
        assert completion.stats.num_plain_steps == len(completion.tokens)
        assert completion.stats.num_draft_tokens == completion.stats.num_spec_steps == 0
        assert completion.stats.mean_acceptance_length == 1


def test_kept_logits_are_the_models_own_whatever_the_schedule():
    target, prompts = tiny("gemma2"), make_prompts(RAGGED, seed=1)
    done = decode(target, prompts, Schedule(5, 4), max_new_tokens=12, keep_logits=True)
    for completion, prompt in zip(done, prompts, strict=True):
        with torch.inference_mode():
            whole = target.model(torch.tensor([[*prompt, *completion.tokens]])).logits[0]
        expected = whole[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(completion.logits), expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(torch.stack(completion.scores), expected, rtol=1e-3, atol=1e-4)
