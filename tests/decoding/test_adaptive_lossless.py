"""The default policy, and one that asks for everything a plan can ask for, change no token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from selfspec.control.adaptive import Adaptive
from selfspec.control.cost_table import Table
from selfspec.control.costs import Costs
from selfspec.control.plan import LOOKUP
from tests.decoding.test_greedy import check_equals_generate
from tests.decoding.test_processors import PROCESSORS
from tests.decoding.test_sampling import WAYS, check_equals_plain
from tests.helpers import Adversary, decode, generate, make_prompts
from tests.models import tiny
from tests.slow import slow

ONE, RAGGED = (9,), (12, 1, 20)
SOME = [
    "llama",
    "gemma2",
    "qwen3_moe",
    "gpt2",
    "gpt_oss",
]  # compiled, soft caps, experts, learned positions, sinks

CASES = [("llama", ONE), *((family, RAGGED) for family in SOME), *(slow(family, ONE) for family in SOME[1:])]


def ways(count):
    return {name: values[:count] for name, values in WAYS.items()}


def where_drafts_pay(num_layers=4):
    """A machine on which a layer is slow, and early passes cost nearly nothing."""
    nothing = Table.of({1: 0.0})
    late = {1: Table.of({1: 1.0, 9: 1.1}), 8: Table.of({1: 1.0, 9: 2.0})}
    early = {1: Table.of({1: 0.01, num_layers: 0.02})}
    plain = Table.of({1: float(num_layers)})
    return Costs(num_layers, plain, early, late, head=nothing, pick=nothing, rest=nothing, short=nothing)


class Watched(Adaptive):
    """Keeps how much its rows drafted by lookup, round by round."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.looked_up = []

    def observe(self, plan, rounds):
        super().observe(plan, rounds)
        by_lookup = [round_.rows for round_ in rounds if round_.exit_layer == LOOKUP]
        self.looked_up += [[outcome.num_drafted for outcome in rows] for rows in by_lookup]


# -------------------------------------------------------------------------------------------------------- the default


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=["one row", "ragged"])
def test_the_default_with_costs_measured_here_changes_no_token(family, lengths):
    target, prompts = tiny(family), make_prompts(lengths, seed=1)
    expected = [generate(target.model, prompt, 30) for prompt in prompts]
    for _ in range(2):  # the second call starts from what the first has seen
        assert [c.tokens for c in target.generate(prompts, max_new_tokens=30)] == expected
    check_equals_plain(target, prompts, None, max_new_tokens=30, **ways(len(prompts)))


@pytest.mark.parametrize(("family", "lengths"), CASES)
def test_the_default_where_drafts_pay_equals_generate(family, lengths):
    done = check_equals_generate(tiny(family), make_prompts(lengths, seed=1), Adaptive(where_drafts_pay()), 40)
    assert sum(c.stats.num_draft_tokens for c in done) > 0


@pytest.mark.parametrize(("family", "lengths"), CASES)
def test_the_default_where_drafts_pay_samples_the_tokens_of_plain_decoding(family, lengths):
    policy = Adaptive(where_drafts_pay())
    done = check_equals_plain(
        tiny(family), make_prompts(lengths, seed=1), policy, max_new_tokens=40, **ways(len(lengths))
    )
    assert sum(c.stats.num_draft_tokens for c in done) > 0


@pytest.mark.parametrize("family", SOME)
def test_a_batch_in_which_some_rows_are_looked_up_equals_generate(family):
    costs = replace(where_drafts_pay(), ragged=Table.of({2: 1.0, 8: 1.0}))
    prompts = [prompt * (1 + i % 2) for i, prompt in enumerate(make_prompts((9, 12, 5, 7, 3), seed=1))]
    policy = Watched(costs, drafts=("lookup",))
    check_equals_generate(tiny(family), prompts, policy, 40)
    together = [lengths for lengths in policy.looked_up if len(lengths) > 2]
    assert any(0 in lengths and any(lengths) for lengths in together)  # some rows draft and others do not


def test_the_default_on_a_trained_model_changes_no_token(stories):
    prompts = [stories.tokenizer(text)["input_ids"] for text in ("Once upon a time", "The dog", "One day, Tom and his")]
    for lengths in (prompts[:1], prompts):
        done = check_equals_generate(stories, lengths, Adaptive(where_drafts_pay(5)), 90)
        assert sum(c.stats.num_accepted_draft_tokens for c in done) > 0
        check_equals_plain(stories, lengths, Adaptive(where_drafts_pay(5)), max_new_tokens=90, **ways(len(lengths)))


# ------------------------------------------------------------------------------------------------------ the adversary


@pytest.mark.parametrize(("family", "lengths"), CASES)
@pytest.mark.parametrize("seed", [1, slow(3)])
def test_whatever_a_plan_asks_for_equals_generate(family, lengths, seed):
    policy = Adversary(seed, 4)
    check_equals_generate(tiny(family), make_prompts(lengths, seed=1), policy, 30, prefill_chunk=7)
    assert policy.shadows and policy.seeds
    assert len({plan.exit_layer for plan, _ in policy.seen}) > 1


@pytest.mark.parametrize(("family", "lengths"), CASES)
@pytest.mark.parametrize("seed", [1, slow(3)])
def test_whatever_a_plan_asks_for_samples_the_tokens_of_plain_decoding(family, lengths, seed):
    policy, prompts = Adversary(seed, 4), make_prompts(lengths, seed=1)
    check_equals_plain(tiny(family), prompts, policy, {"prefill_chunk": 7}, max_new_tokens=30, **ways(len(lengths)))
    assert policy.shadows and policy.seeds


def test_whatever_a_plan_asks_for_equals_generate_under_processors_which_shadows_leave_alone():
    target, policy = tiny("phi"), Adversary(1, 4)
    [prompt] = make_prompts([7])
    made = tuple(PROCESSORS["several"](7))
    done = decode(target, [prompt, prompt], policy, max_new_tokens=30, logits_processor=[made, ()])
    assert done[0].tokens == generate(target.model, prompt, 30, made)
    assert done[1].tokens == generate(target.model, prompt, 30) != done[0].tokens
    assert {row.request_id for row, _, _ in policy.shadows} == {1}
    assert {row.request_id for row, _ in policy.seeds} <= {1}
