"""Drafts over a part of the vocabulary: the same output, and the same picks wherever the pick is among those tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control import drafters
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs, Table
from selfspec.core import StageSeconds
from selfspec.kernels.gumbel import NoiseAhead
from selfspec.kernels.pick import Subset, best_of, scored, to_token_ids
from selfspec.loading.target import Target
from selfspec.model.draft_vocabulary import Frequencies, covering_size, default_size
from selfspec.model.exit_heads import ExitHeads
from selfspec.params import SamplingParams, SpeculativeConfig
from tests.decoding.test_greedy import check_equals_generate
from tests.decoding.test_sampling import check_equals_plain
from tests.helpers import Always, Run, decode, engine_of, generate, make_prompts, request, run
from tests.models import build, tiny
from tests.where_drafts_pay import where_drafts_pay

RAGGED = (12, 7, 1, 20)
MANY = 1000  # tokens of a text, enough for ranks to be learned anew


def ban(input_ids, scores):
    return scores.index_fill(1, torch.tensor([7]), float("-inf"))


@pytest.mark.parametrize(("family", "backend"), [("llama", "compiled"), ("llama", "views"), ("gemma2", "views")])
def test_output_is_that_of_generate_and_of_plain_sampling(family, backend):
    target, prompts = Target(build(family), backend=backend), make_prompts(RAGGED)
    for seed, temperature in enumerate((0.0, 0.9)):
        params = SamplingParams(max_tokens=24, temperature=temperature, top_k=9, seed=seed)
        done = check_equals_plain(target, prompts, Always(2, 4, 0.2 * seed, draft_vocab=40), params)
        assert sum(one.stats.num_accepted_draft_tokens for one in done) > 0


def test_drafts_are_tokens_of_the_subset_and_those_of_the_whole_head_where_it_has_them():
    target = tiny("llama")
    with torch.inference_mode():
        hidden = torch.randn(30, 32)
        whole = target.split.logits(hidden, 2)
        subset = target.split.draft_subset(33)
        logits, tokens = target.split.subset_logits(hidden, 2, subset), subset.tokens
    assert tokens.tolist() == sorted({*tokens.tolist()}) and len(tokens) == 33
    torch.testing.assert_close(logits, whole[:, tokens], rtol=1e-5, atol=1e-5)
    assert target.split.draft_subset(96) is None


def test_exit_heads_come_before_a_small_head_too():
    target = Target(build("llama"))
    target.exit_heads = ExitHeads([2], 32, 4)
    torch.nn.init.normal_(target.split.exit_heads.heads["2"].down)
    hidden = torch.randn(5, 32)
    with torch.inference_mode():
        subset = target.split.draft_subset(20)
        logits, expected = target.split.subset_logits(hidden, 2, subset), target.split.logits(hidden, 2)
        torch.testing.assert_close(logits, expected[:, subset.tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["compiled", "views"])
def test_edited_heads_are_honoured(backend):
    target, hidden = Target(build("llama"), backend=backend), torch.randn(5, 32)
    with torch.inference_mode():
        before = target.split.subset_logits(hidden, 2, target.split.draft_subset(20))
    with torch.no_grad():
        target.model.lm_head.weight.mul_(-2)
    target.split.refresh()
    with torch.inference_mode():
        after = target.split.subset_logits(hidden, 2, target.split.draft_subset(20))
    torch.testing.assert_close(after, -2 * before, rtol=1e-5, atol=1e-5)


def test_a_fixed_exit_drafts_over_an_eighth_where_the_head_weighs_more_than_two_layers():
    assert default_size(49_152, 49_152 * 576, 3_500_000) == 6144
    assert default_size(49_152, 49_152 * 576, 15_000_000) is None
    assert default_size(32_000, 10**9, 1) is None, "an eighth of a small vocabulary leaves out too much"
    target, [prompt] = Target(build("llama", vocab_size=33_000)), make_prompts([9])
    assert target.split.default_draft_vocab == 4125
    assert tiny("llama").split.default_draft_vocab is None
    fixed = SpeculativeConfig(exit_layer=2, num_speculative_tokens=3)
    made = run(target, [prompt], fixed, SamplingParams(max_tokens=16))
    assert {round_.plan.draft_vocab for round_ in made.rounds} == {4125}
    assert made.outputs[0].token_ids == generate(target.model, prompt, 16)


def test_rows_with_processors_draft_over_the_whole_vocabulary():
    params = SamplingParams(max_tokens=16, logits_processors=ban)
    policy = Always(2, 3, draft_vocab=30)
    check_equals_plain(tiny("llama"), make_prompts([9]), policy, params)
    assert policy.rows and not any(row.is_outside_vocab for row in policy.rows)


@given(
    size=st.integers(1, 50),
    temperature=st.sampled_from([0.0, 0.8]),
    keeps_noise=st.booleans(),
    seed=st.integers(0, 99),
)
def test_picks_are_the_best_of_the_subset_with_the_same_noise(size, temperature, keeps_noise, seed):
    generator = torch.Generator().manual_seed(seed)
    logits, tokens = torch.randn(3, 50, generator=generator), torch.randperm(50, generator=generator)[:size].sort()[0]
    params, positions = [SamplingParams(temperature=temperature, seed=s) for s in (1, 2, 2)], torch.tensor([4, 9, 10])
    noise = NoiseAhead() if keeps_noise else None
    whole = scored(logits, params, positions)
    expected = torch.full_like(whole, float("-inf"))
    expected[:, tokens] = whole[:, tokens]
    subset = Subset(tokens, 50)
    picks, confidences = best_of(scored(logits[:, tokens], params, positions, noise, subset))
    assert torch.equal(to_token_ids(picks, subset), expected.argmax(-1))
    torch.testing.assert_close(confidences, expected.softmax(-1).amax(-1))


def test_ranks_begin_with_low_ids_and_follow_what_is_seen():
    seen = Frequencies(1000)
    assert seen.top(4).tolist() == [0, 1, 2, 3]
    seen.add([500, 500, 900])
    assert seen.top(4).tolist() == [0, 1, 500, 900]
    seen.add([7] * MANY)
    assert seen.top(2).tolist() == [7, 500]


def test_the_size_for_some_texts_covers_almost_all_of_their_tokens():
    assert covering_size({1: 1}) == covering_size(dict.fromkeys(range(400), 5)) == 2048
    assert covering_size(dict.fromkeys(range(3000), 7)) == 3008  # 2,970, in groups of 64
    assert covering_size(dict.fromkeys(range(2100), 1000) | dict.fromkeys(range(2100, 5000), 1)) == 2112
    seen = Frequencies(1000)
    assert seen.focus is None
    seen.add_counts({2000: 5})
    assert seen.focus is None, "none of its tokens is in the vocabulary"
    seen.add_counts({20: 5})
    assert seen.focus == 2048


def test_ranks_are_learned_anew_while_a_part_misses_tokens():
    seen, tokens = Frequencies(1000), [*range(40)]
    seen.add([7] * 2 * MANY)
    assert seen.coverage(40) == Frequencies(1000).coverage(40), "nothing was written yet"
    seen.add([7], written=True)
    assert seen.part(40).version == 0, "it was ranked just now"
    seen.add([8] * MANY)
    assert seen.part(40).version == 1
    seen.add(tokens * 2, written=True)
    assert seen.coverage(40) > 0.98 > seen.coverage(10)
    for _ in range(20):
        seen.add(tokens * 20, written=True)
    assert seen.part(40).version == 1 < seen.part(10).version, "each by what it misses itself"
    seen.add([900] * 20000, written=True)  # of the ranks before
    seen.add([900] * 10000, written=True)
    assert seen.part(40).version == 2 and 900 in seen.part(40).members


def test_threads_may_count_together():
    """A token's count is above its number, so that the ranks tell of a single one that is lost."""
    seen = Frequencies(80)

    def work(first):
        for i in range(80):
            for token in range(max(first, i + -(i - first) % 4), 80, 4):
                seen.add([token], written=token % 3 == 0)
            assert 0 <= seen.coverage(10 + i % 7) <= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert all(seen.top(size).tolist() == [*range(80 - size, 80)] for size in range(1, 81))


def test_an_engine_counts_prompts_and_outputs_and_refuses_an_empty_vocabulary():
    target = Target(build("llama"))
    made = Run(engine_of(target, Always(2, 3, draft_vocab=20)))
    made.add([11, 12, 11], SamplingParams(max_tokens=6))
    before = target.split.frequencies.coverage(96)
    emitted = made.finish().outputs[0].token_ids
    assert len(emitted) == 6 and target.split.frequencies.coverage(96) > before  # of the tokens it has written
    expected = Frequencies(96)
    expected.add([11, 12, 11, *emitted])
    for size in range(1, 10):
        assert torch.equal(target.split.frequencies.top(size), expected.top(size))
    with pytest.raises(ValueError, match=r"^a plan's draft_vocab must be a whole number of at least 1, got 0$"):
        decode(target, [[3, 4]], Always(2, 3, draft_vocab=0), SamplingParams(max_tokens=4))


def test_coverage_is_of_written_tokens_by_the_ranks_before_them():
    seen = Frequencies(1000)
    unknown = seen.coverage(100)
    assert 0 < unknown < 1
    seen.add([900] * 50)  # a prompt says how frequent tokens are, not how well they are covered
    assert seen.coverage(100) == unknown
    seen.add([900] * MANY, written=True)  # ranked anew only after them
    assert seen.coverage(100) < 0.1
    assert 900 in seen.part(100).members
    seen.add([900] * MANY, written=True)
    assert seen.coverage(100) > 0.9


@given(
    blocks=st.lists(
        st.tuples(st.lists(st.integers(0, 49), max_size=200), st.booleans(), st.sampled_from([None, 5, 20])),
        max_size=12,
    )
)
def test_what_is_counted_late_is_what_is_counted_at_once(blocks):
    late, at_once = Frequencies(50), Frequencies(50)
    for tokens, written, asked in blocks:
        for seen in (late, at_once):
            seen.add(tokens, written)
        at_once.top(1)  # asking counts
        if asked is not None:
            assert late.coverage(asked) == at_once.coverage(asked)
    for size in (5, 20, 35):
        assert late.part(size).version == at_once.part(size).version
        assert late.part(size).members == at_once.part(size).members
        assert late.coverage(size) == at_once.coverage(size)


def test_the_part_that_is_drafted_over_is_the_one_that_coverage_is_of():
    target = Target(build("llama"))
    target.split.frequencies.coverage(20)  # asked for before anything is drafted
    for tokens in ([95, 94], [93] * MANY, [92] * MANY):
        target.split.frequencies.add(tokens)
        drafted = target.split.draft_subset(20).tokens.tolist()
        assert {*drafted} == target.split.frequencies.part(20).members
    assert {92, 93, 94, 95} <= {*drafted}


@pytest.mark.parametrize("draft_vocab", [30, None])
def test_a_policy_observes_where_no_draft_could_have_been_right(draft_vocab):
    """Of a row at a time, the target's token at the first rejection is the last of its round."""
    target, policy = Target(build("llama")), Always(2, 3, draft_vocab=draft_vocab)
    made = Run(engine_of(target, policy, max_num_seqs=1))
    for prompt in make_prompts(RAGGED):
        made.add(request(prompt, SamplingParams(max_tokens=20)))
    expected = []
    while made.engine.has_unfinished_requests():
        members = target.split.frequencies.part(draft_vocab).members if draft_vocab else range(96)
        for row in [row for round_ in made.step() for row in round_.rows]:
            if row.token_ids:
                refused = row.num_accepted < len(row.drafted) and len(row.token_ids) > row.num_accepted
                expected.append(bool(row.drafted) and refused and row.token_ids[-1] not in members)
    assert [row.is_outside_vocab for row in policy.rows] == expected
    assert any(expected) == (draft_vocab is not None) and not all(expected)


def test_where_a_row_ended_before_the_rejection_nothing_was_outside():
    model, policy = build("llama"), Always(3, 4, draft_vocab=30)
    with torch.no_grad():
        model.lm_head.weight[30:] *= 0.5  # some of its tokens are not drafted, and most are
    eos = frozenset(range(0, 96, 5))
    asked = [request(prompt, SamplingParams(max_tokens=12), eos_token_ids=eos) for prompt in make_prompts([5] * 80)]
    made = run(Target(model), asked, policy)
    assert any(row.is_outside_vocab for row in policy.rows)
    assert any(row.num_accepted for round_ in made.rounds for row in round_.rows)
    assert all(row.num_accepted < row.num_drafted for row in policy.rows if row.is_outside_vocab)


class Watched(Adaptive):
    """The default where a head is as dear as several layers; keeps its plans, and what became of them."""

    def __init__(self):
        super().__init__(replace(where_drafts_pay(), head=Table.of({1: 3.0, 9: 3.1})))
        self.seen = []

    def plan(self, rows):
        self.ledger = self.ledger._replace(balance=self.ledger.most)  # whatever was lost before
        return replace(super().plan(rows), ledger=None)

    def observe(self, plan, rounds):
        """As on a machine whose rounds take what the table says."""
        self.seen += [(plan, row) for round_ in rounds if round_.exit_layer for row in round_.rows]
        for round_ in rounds:
            share = self._drafters.share(plan.draft_vocab)
            took = self.costs.stages(round_.exit_layer, [row.num_drafted for row in round_.rows], draft_share=share)
            round_.seconds = StageSeconds(**took)
        super().observe(plan, rounds)


@pytest.mark.parametrize("backend", ["auto", "views"])
@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=["one row", "ragged"])
def test_the_default_drafts_over_a_part_where_that_pays_and_changes_no_token(backend, lengths, monkeypatch):
    monkeypatch.setattr(drafters, "LEAST_VOCAB", 12)  # of 96 tokens
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[20:] *= 0.1  # it writes the first tokens only, nearly always
    target, prompts = Target(model, backend=backend), make_prompts(lengths, seed=1)
    greedy, sampled = Watched(), Watched()
    check_equals_generate(target, prompts, greedy, 90)
    check_equals_plain(target, prompts, sampled, SamplingParams(max_tokens=90, temperature=0.6, seed=4))
    for policy in (greedy, sampled):
        over = [row for plan, row in policy.seen if plan.draft_vocab is not None]
        assert {plan.draft_vocab for plan, _ in policy.seen} <= {None, 12, 24}
        assert sum(row.num_accepted for row in over) > 0


def test_costs_of_a_small_head():
    flat = Table((1, 8), (1.0, 1.0))
    steps = {1: flat.scaled(3.0)}
    costs = Costs(4, {1: flat.scaled(9.0)}, steps, head=flat, context=flat.scaled(0.0), shadow_picks=flat)
    assert costs.round(2, [3]) - costs.round(2, [3], draft_share=0.25) == pytest.approx(3 * 0.75)
