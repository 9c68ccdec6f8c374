"""Drafts over a part of the vocabulary: the same output, and the same picks wherever the pick is among those tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.api import Target
from selfspec.control.costs import Costs, Table
from selfspec.control.fixed import Fixed
from selfspec.decoding.engine import Engine
from selfspec.decoding.pick import Sampling, Subset, pick, pick_surely, scored
from selfspec.kernels.gumbel import NoiseAhead
from selfspec.target.draft_head import AT_LEAST, Frequencies
from selfspec.target.exit_heads import ExitHeads
from tests.helpers import generate, make_prompts
from tests.models import build, tiny

RAGGED = (12, 7, 1, 20)


class Ban:
    """A processor that bans one token."""

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.tensor([7]), float("-inf"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "cohere", "gpt2"])
@pytest.mark.parametrize("engine", ["auto", "views"])
def test_output_is_that_of_generate(family, engine):
    target, prompts = Target(build(family), engine=engine), make_prompts(RAGGED)
    done = target.generate(prompts, policy=Fixed(2, 4, draft_vocab=40), max_new_tokens=24)
    assert [c.tokens for c in done] == [generate(target.model, prompt, 24) for prompt in prompts]
    assert sum(c.stats.num_accepted_draft_tokens for c in done) > 0


@pytest.mark.parametrize("options", [{"temperature": 0.9, "seed": 5}, {"temperature": 0.7, "top_k": 9, "seed": 1}])
def test_sampled_output_is_that_of_plain_decoding(options):
    target, prompts = tiny("llama"), make_prompts(RAGGED)
    plain = target.generate(prompts, policy="plain", max_new_tokens=20, **options)
    drafted = target.generate(prompts, policy=Fixed(3, 4, 0.2, draft_vocab=48), max_new_tokens=20, **options)
    assert [c.tokens for c in drafted] == [c.tokens for c in plain]
    assert sum(c.stats.num_accepted_draft_tokens for c in drafted) > 0


def test_drafts_are_tokens_of_the_subset_and_those_of_the_whole_head_where_it_has_them():
    target = tiny("llama")
    with torch.inference_mode():
        hidden = torch.randn(30, 32)
        whole = target.stack.logits(hidden, 2)
        logits, tokens = target.stack.draft_logits(hidden, 2, 33)
    assert tokens.tolist() == sorted({*tokens.tolist()}) and len(tokens) == 33
    torch.testing.assert_close(logits, whole[:, tokens], rtol=1e-5, atol=1e-5)
    assert target.stack.draft_logits(hidden, 2, 96)[1] is None


def test_exit_heads_come_before_a_small_head_too():
    target = Target(build("llama"))
    target.exit_heads = ExitHeads([2], 32, 4)
    torch.nn.init.normal_(target.stack.exit_heads.heads["2"].up)
    hidden = torch.randn(5, 32)
    with torch.inference_mode():
        logits, tokens = target.stack.draft_logits(hidden, 2, 20)
        torch.testing.assert_close(logits, target.stack.logits(hidden, 2)[:, tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ["compiled", "fused", "views"])
def test_edited_heads_are_honoured(engine):
    target, hidden = Target(build("llama"), engine=engine), torch.randn(5, 32)
    with torch.inference_mode():
        before, _ = target.stack.draft_logits(hidden, 2, 20)
    with torch.no_grad():
        target.model.lm_head.weight.mul_(-2)
    target.stack.refresh()
    with torch.inference_mode():
        after, _ = target.stack.draft_logits(hidden, 2, 20)
    torch.testing.assert_close(after, -2 * before, rtol=1e-5, atol=1e-5)


def test_rows_with_processors_draft_over_the_whole_vocabulary():
    target, prompts = tiny("llama"), make_prompts([9])
    options = {"max_new_tokens": 16, "logits_processor": Ban()}
    plain = target.generate(prompts, policy="plain", **options)
    assert target.generate(prompts, policy=Fixed(2, 3, draft_vocab=30), **options)[0].tokens == plain[0].tokens


@given(
    size=st.integers(1, 50),
    temperature=st.sampled_from([0.0, 0.8]),
    keeps_noise=st.booleans(),
    seed=st.integers(0, 99),
)
def test_picks_are_the_best_of_the_subset_with_the_same_noise(size, temperature, keeps_noise, seed):
    generator = torch.Generator().manual_seed(seed)
    logits, tokens = torch.randn(3, 50, generator=generator), torch.randperm(50, generator=generator)[:size].sort()[0]
    samplings, positions = [Sampling(temperature, seed=s) for s in (1, 2, 2)], torch.tensor([4, 9, 10])
    noise = NoiseAhead() if keeps_noise else None
    whole = scored(logits, samplings, positions)
    expected = torch.full_like(whole, float("-inf"))
    expected[:, tokens] = whole[:, tokens]
    subset = Subset(tokens, 50)
    assert torch.equal(pick(logits[:, tokens], samplings, positions, noise, subset), expected.argmax(-1))
    picks, sure = pick_surely(logits[:, tokens], samplings, positions, noise, subset)
    assert torch.equal(picks, expected.argmax(-1))
    torch.testing.assert_close(sure, expected.softmax(-1).amax(-1))


def test_ranks_begin_with_low_ids_and_follow_what_is_seen():
    seen = Frequencies(1000)
    assert seen.top(4).tolist() == [0, 1, 2, 3]
    seen.add([500, 500, 900])
    assert seen.version == 0
    assert seen.top(4).tolist() == [0, 1, 500, 900]
    seen.add([7] * AT_LEAST)
    assert seen.version == 1
    assert seen.top(2).tolist() == [7, 500]


def test_an_engine_counts_prompts_and_outputs_and_refuses_an_empty_vocabulary():
    target = Target(build("llama"))
    engine = Engine(target, policy=Fixed(2, 3, draft_vocab=20))
    engine.submit([11, 12, 11], max_new_tokens=6)
    emitted = [row.tokens for round_ in engine.run() for row in round_.rows]
    assert target.stack.frequencies._counts.total() == 3 + sum(map(len, emitted)) == 9
    with pytest.raises(ValueError, match=r"^a plan's draft_vocab must be a whole number of at least 1, got 0$"):
        target.generate([[3, 4]], policy=Fixed(2, 3, draft_vocab=0), max_new_tokens=4)


def test_costs_of_a_small_head():
    flat = Table((1, 8), (1.0, 1.0))
    costs = Costs(4, flat, {1: flat}, {1: flat}, head=flat, pick=flat, rest=flat, short=flat)
    whole, part = costs.stages(2, [3]), costs.stages(2, [3], draft_share=0.25)
    assert (whole["head"], part["head"]) == (4.0, 1.75)
    assert costs.round(2, [3]) - costs.round(2, [3], draft_share=0.25) == pytest.approx(4.5)
