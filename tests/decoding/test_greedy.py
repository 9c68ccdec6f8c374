"""Greedy decoding in float32 is transformers' own `generate`, token for token, whatever the schedule.

After every round keys and values, in every row and layer, are those of a plain forward over all but the last token.
Keys are compared as they are stored: turned by their position, where the family turns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.loading.target import Target
from selfspec.model.split_model import SplitModel
from selfspec.params import SamplingParams
from tests.helpers import (
    Adversary,
    Always,
    Run,
    Schedule,
    audit_cache,
    decode,
    engine_of,
    generate,
    make_prompts,
    request,
    run,
    tokens_of,
)
from tests.models import FAMILIES, build, tiny
from tests.slow import FRESH, slow

RAGGED = (12, 7, 1, 20)


def check_equals_generate(
    target: Target,
    prompts: list[list[int]],
    policy: Any,
    max_tokens: int = 16,
    audit: bool = True,
    processors: Sequence[Any] = (),
    **options: Any,
) -> Any:
    """Outputs whose tokens are generate's; after every round, keys and values are a plain forward's."""
    params = SamplingParams(max_tokens=max_tokens, logits_processors=tuple(processors) or None)
    done = decode(target, prompts, policy, params, audit=audit_cache if audit else None, **options)
    assert tokens_of(done) == [generate(target.model, prompt, max_tokens, processors) for prompt in prompts]
    return done


KINDS = ("llama", "gemma2", "qwen3_moe", "gpt2", "gpt_oss")  # compiled, soft caps, experts, learned positions, sinks
OTHERS = [slow(family) for family in FAMILIES if family not in KINDS]


@pytest.mark.parametrize("family", [*KINDS, *OTHERS])
def test_whatever_a_plan_asks_for_equals_generate_and_plain_sampling(family):
    target, prompts, policy = tiny(family), make_prompts((12, 1, 20), seed=1), Adversary(1, 4)
    params = [SamplingParams(max_tokens=30, seed=at, temperature=(0.0, 0.8, 1.2)[at], top_p=0.95) for at in range(3)]
    plain = [decode(target, [prompt], "plain", own)[0] for prompt, own in zip(prompts, params, strict=True)]
    done = decode(target, prompts, policy, params, audit=audit_cache, prefill_chunk=7)
    assert tokens_of(done) == tokens_of(plain)
    assert done[0].token_ids == generate(target.model, prompts[0], 30)
    assert policy.shadows and policy.seeds


SCHEDULES = {
    "lengths": st.lists(st.integers(1, 24), min_size=1, max_size=8),
    "max_tokens": st.integers(1, 20),
    "page_size": st.sampled_from([1, 4, 7, 16, 64]),
    "prefill_chunk": st.sampled_from([1, 3, 10, 512]),
    "max_num_seqs": st.integers(1, 8),
    "seed": st.integers(0, 10_000),
}


@given(**SCHEDULES)
def test_any_batch_and_any_schedule_equal_generate(lengths, max_tokens, seed, **options):
    prompts = make_prompts(lengths, seed)
    check_equals_generate(tiny("llama"), prompts, Schedule(seed, 4), max_tokens, max_num_cached_tokens=512, **options)


@pytest.mark.slow
@FRESH
@given(family=st.sampled_from(sorted(FAMILIES)), **SCHEDULES)
def test_any_schedule_of_any_family_equals_generate(family, lengths, max_tokens, seed, **options):
    prompts = make_prompts(lengths, seed)
    check_equals_generate(tiny(family), prompts, Schedule(seed, 4), max_tokens, max_num_cached_tokens=512, **options)


def test_a_whole_acceptance_leaves_no_hole_where_its_last_draft_was():
    """The last drafted token's early keys are needed exactly when all of the draft is accepted."""
    done = decode(
        tiny("llama"), make_prompts(RAGGED), Always(3, 3), SamplingParams(max_tokens=14), audit=audit_cache, page_size=7
    )
    assert sum(one.stats.acceptance_histogram[3] for one in done) > 3


def test_pages_of_a_row_may_lie_anywhere():
    scattered = []

    def audit(engine):
        audit_cache(engine)
        scattered.extend(row for row in engine.running if row.pages[-1] - row.pages[0] != len(row.pages) - 1)

    prompts = make_prompts([3, 9, 3, 9, 20, 25, 30])
    params = [SamplingParams(max_tokens=4 + 3 * (i % 3)) for i in range(7)]
    options = {"max_num_seqs": 4, "max_num_cached_tokens": 160, "page_size": 4}
    decode(tiny("llama"), prompts, Schedule(0, 4), params, audit=audit, **options)
    assert scattered


def test_a_long_prompt_is_read_while_rows_decode():
    """More than 32 prompt tokens are attended to apart from the short rows of the same call."""
    params = [SamplingParams(max_tokens=n) for n in (20, 6, 12, 9)]
    options = {"max_num_seqs": 4, "max_num_cached_tokens": 512, "prefill_chunk": 50}
    decode(tiny("gemma2"), make_prompts([4, 90, 3, 70]), Schedule(0, 4), params, audit=audit_cache, **options)


# ------------------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("max_tokens", [1, 4, 5, 6])
def test_a_row_emits_exactly_its_limit_around_the_draft_length_of_four(max_tokens):
    done = check_equals_generate(tiny("llama"), make_prompts(RAGGED, seed=4), Always(2, 4), max_tokens)
    assert {(len(one.token_ids), one.finish_reason) for one in done} == {(max_tokens, "length")}


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("short", [1, 5])
def test_a_row_ends_where_the_context_does(family, short):
    target = tiny(family)
    [prompt] = make_prompts([target.split.context_limit - short], seed=4)
    expected = generate(target.model, prompt, short)
    for policy in (Always(None, 0), Always(2, 4), Schedule(0, 4)):
        [done] = decode(target, [prompt], policy, SamplingParams(max_tokens=50))
        assert (done.token_ids, done.finish_reason) == (expected, "length")


@pytest.mark.parametrize("policy", [Always(3, 5), Schedule(1, 4), Adversary(0, 4, eager=1.0), Always(None, 0)])
def test_an_end_of_text_inside_a_block_ends_the_row_there(policy):
    """Whatever index it has in its block, nothing follows it, and it is the last token kept."""
    target, [prompt] = tiny("llama"), make_prompts([9], seed=5)
    free = generate(target.model, prompt, 14)
    firsts = {token: at for at, token in reversed(list(enumerate(free)))}
    assert len(firsts) > 6
    other = request(make_prompts([4], seed=6)[0], SamplingParams(max_tokens=14))  # a neighbour that goes on
    for token, at in firsts.items():
        ends = request(prompt, SamplingParams(max_tokens=14), eos_token_ids=frozenset([token]))
        done = decode(target, [ends, other], policy)
        assert (done[0].token_ids, done[0].finish_reason) == (free[: at + 1], "stop")
        assert done[1].token_ids == generate(target.model, other.prompt_token_ids, 14)


def test_several_end_of_text_tokens_end_at_the_first_as_generate_does():
    model = build("llama")
    [prompt] = make_prompts([9], seed=5)
    free = generate(model, prompt, 14)
    model.generation_config.eos_token_id = [free[8], free[5]]
    model.generation_config.pad_token_id = free[5]
    target = Target(model)
    assert target.eos_token_ids == {free[8], free[5]}
    [done] = decode(target, [prompt], Always(3, 6), SamplingParams(max_tokens=14))
    assert done.token_ids == generate(model, prompt, 14) == free[: free.index(free[5]) + 1]


def test_prompts_that_hold_the_pad_and_end_of_text_token_are_read_like_any_other():
    target = tiny("llama")
    eos = next(iter(target.eos_token_ids))
    several = enumerate(make_prompts([5, 8, 3]))
    prompts = [[eos, *prompt[:3], eos, eos, *prompt[3:], *[eos] * i] for i, prompt in several]
    check_equals_generate(target, prompts, Schedule(2, 4))


# ------------------------------------------------------------------------------------------- good drafts and bad ones


@pytest.mark.parametrize("exit_layer", [1, 3])
def test_drafts_that_are_always_right_are_all_accepted(exit_layer):
    model = build("llama")
    for layer in model.model.layers[1:]:  # which add nothing: every exit is the target
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    target, prompts = Target(model), make_prompts(RAGGED, seed=1)
    for one in check_equals_generate(target, prompts, Always(exit_layer, 4)):
        # rounds of 5, 5, 5 and a last one with no capacity for a draft
        assert (one.stats.acceptance_histogram, one.stats.num_plain_steps) == ({4: 3}, 1)
        assert (one.stats.draft_acceptance_rate, one.stats.mean_acceptance_length) == (1, 5)
        assert one.stats.acceptance_by_position() == [(1.0, 1.0)] * 4
    check_equals_generate(target, prompts, Schedule(exit_layer, 4))


def test_drafts_that_are_always_wrong_are_all_rejected(monkeypatch):
    honest = SplitModel.head_logits

    def adversary(self, hidden, lacks_norm):  # final states have the norm, an exit's lack it
        logits = honest(self, hidden, lacks_norm)
        return -logits if lacks_norm else logits

    monkeypatch.setattr(SplitModel, "head_logits", adversary)
    for policy in (Always(1, 4), Always(3, 6), Schedule(0, 4, lookup=False)):
        for one in check_equals_generate(tiny("llama", backend="views"), make_prompts(RAGGED, seed=1), policy):
            assert one.stats.num_accepted_draft_tokens == 0 < one.stats.num_draft_tokens
            assert one.stats.mean_acceptance_length == 1


@pytest.mark.parametrize("confidence", [0.5, 1.01])
def test_drafts_that_stop_at_low_confidence_change_nothing(confidence):
    target, prompts = tiny("qwen3"), make_prompts(RAGGED, seed=1)
    done = check_equals_generate(target, prompts, Always(2, 6, confidence), 20)
    always = check_equals_generate(target, prompts, Always(2, 6), 20)
    assert sum(one.stats.num_draft_tokens for one in done) < sum(one.stats.num_draft_tokens for one in always)
    if confidence > 1:  # a row drafts one token a round, and keeps it
        assert {d for one in done for d in one.stats.acceptance_histogram_by_draft_length} == {1}


def test_plain_decoding_is_the_same_code_with_nothing_drafted():
    for one in check_equals_generate(tiny("llama"), make_prompts(RAGGED, seed=1), "plain"):
        assert one.stats.num_plain_steps == len(one.token_ids)
        assert one.stats.num_draft_tokens == one.stats.num_spec_steps == 0


def test_kept_logits_are_the_models_own_whatever_the_schedule():
    target, prompts = tiny("gemma2"), make_prompts(RAGGED, seed=1)
    asked = [request(prompt, SamplingParams(max_tokens=12), keep_logits=True) for prompt in prompts]
    made = run(target, asked, Schedule(5, 4))
    for at, prompt in enumerate(prompts):
        row = made.sequences[str(at)]
        with torch.inference_mode():
            whole = target.model(torch.tensor([row.token_ids])).logits[0]
        expected = whole[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(row.logits), expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(torch.stack(row.scores), expected, rtol=1e-3, atol=1e-4)


# --------------------------------------------------------------------------------------------- a trained checkpoint

STORIES = ["Once upon a time, there was a little girl", "The dog", "", "Lily was sad because"]


@pytest.mark.parametrize("backend", ["compiled", slow("views")])
def test_a_trained_checkpoint_writes_what_generate_writes_and_deeper_exits_are_right_more_often(stories, backend):
    target, rates = Target(stories.model, stories.tokenizer, backend=backend), []
    ids = [stories.tokenizer(text)["input_ids"] for text in STORIES]
    expected = [generate(stories.model, prompt, 90) for prompt in ids]
    for policy in (*(Always(layer, 4, num_rounds=9) for layer in (1, 2, 3, 4)), Schedule(1, 5, longest=9)):
        done = decode(target, STORIES, policy, SamplingParams(max_tokens=90), max_num_seqs=3, prefill_chunk=11)
        assert tokens_of(done) == expected
        for text, prompt, one in zip(STORIES, ids, done, strict=True):
            whole = stories.tokenizer.decode([*prompt, *one.token_ids], skip_special_tokens=True)
            assert text + one.text == whole
        accepted = sum(one.stats.num_accepted_draft_tokens for one in done)
        rates.append(accepted / sum(one.stats.num_draft_tokens for one in done))
    assert rates[:4] == sorted(rates[:4]) and rates[3] > 2 * rates[0] > 0


def test_a_text_that_fills_the_context_ends_there(stories):
    prompt = generate(stories.model, stories.tokenizer(STORIES[0])["input_ids"], 60)
    prompt = [token for token in prompt * 12 if token not in stories.eos_token_ids][:490]
    made = Run(engine_of(stories, Schedule(0, 5)))
    made.add(prompt, SamplingParams(max_tokens=200))
    [done] = made.finish().outputs
    assert done.token_ids == generate(stories.model, prompt, 22)
    assert len(prompt) + len(done.token_ids) == stories.split.context_limit or done.finish_reason == "stop"
