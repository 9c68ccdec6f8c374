"""Policies by name: what they plan, what they refuse; and policies of one's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import selfspec
from selfspec import SpeculativeConfig
from selfspec.control.fixed import Fixed, Plain
from selfspec.control.plan import NUM_BINS, Plan, Policy, SecondChoices, always
from selfspec.control.registry import make_policy
from selfspec.control.rows import RowState
from tests.helpers import Schedule, decode, generate, make_prompts
from tests.models import tiny


def rows(*rooms):
    return [RowState(i, 10, room) for i, room in enumerate(rooms)]


def test_plain_drafts_nothing():
    plan = Plain().plan(rows(5, 1, 9))
    assert (plan.exit_layer, plan.draft_lengths, plan.table) == (None, (0, 0, 0), None)


def test_fixed_drafts_its_length_in_every_row():
    plan = Fixed(3, 4, 0.5).plan(rows(9, 5, 1))
    assert (plan.exit_layer, plan.draft_lengths, plan.min_confidence) == (3, (4, 4, 4), 0.5)


def test_names_make_policies_with_a_quarter_of_the_layers_and_four_tokens_by_default():
    assert make_policy("fixed", 12) == Fixed(3, 4)
    assert make_policy("fixed", 3) == Fixed(1, 4)
    assert make_policy("fixed", 12, 5, 2) == Fixed(5, 2)
    assert make_policy("fixed", 12, draft_vocab=4096) == Fixed(3, 4, draft_vocab=4096)
    assert make_policy("plain", 12, 5, 2) == Plain()
    assert make_policy("fixed", 12, 5, 0) == Plain()


def test_a_policy_object_is_used_as_it_is():
    mine = Schedule(0, 4)
    assert make_policy(mine, 4) is mine


@pytest.mark.parametrize(
    ("name", "exit_layer", "num_draft_tokens", "sentence"),
    [
        ("clever", None, None, "policy must be one of adaptive, plain, fixed.*, got 'clever'"),
        ("fixed", 0, None, r"exit_layer must lie in 1\.\.11 for this model, got 0"),
        ("fixed", 12, None, r"exit_layer must lie in 1\.\.11 for this model, got 12"),
        ("fixed", -1, None, r"exit_layer must lie in 1\.\.11 for this model, got -1"),
        ("plain", 12, None, r"exit_layer must lie in 1\.\.11 for this model, got 12"),
        ("fixed", None, -1, r"num_draft_tokens must be at least 0 \(0 is plain decoding\), got -1"),
    ],
)
def test_what_makes_no_policy_is_refused_by_name(name, exit_layer, num_draft_tokens, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_policy(name, 12, exit_layer, num_draft_tokens)


def test_a_policy_sees_every_rows_state_and_what_became_of_its_plan():
    class Watching(Schedule):
        def plan(self, rows):
            self.states = [*getattr(self, "states", []), rows]
            return super().plan(rows)

    policy, prompts = Watching(0, 4), make_prompts([5, 9])
    done = decode(tiny("llama"), prompts, policy, max_new_tokens=[6, 11])
    assert len(policy.states) == len(policy.seen)
    lengths = {0: 5, 1: 9}
    for states, (plan, [(_, outcomes, _)]) in zip(policy.states, policy.seen, strict=True):
        assert [o.request_id for o in outcomes] == [s.request_id for s in states]
        for state, outcome, planned in zip(states, outcomes, plan.draft_lengths, strict=True):
            assert state.content_length == lengths[state.request_id]
            assert state.room == {0: 11, 1: 20}[state.request_id] - state.content_length
            assert outcome.num_accepted <= outcome.num_drafted <= min(planned, state.room - 1)
            lengths[state.request_id] += outcome.num_accepted + 1
    assert lengths == {0: 11, 1: 20}
    assert [len(c.tokens) for c in done] == [6, 11]


class Once(Policy):
    """A policy of one plan, good or bad."""

    def __init__(self, plan):
        self.made = plan

    def plan(self, rows):
        return self.made


def beside(num_rates, rate, most, lengths=(2, 2)):
    """A plan of one layer that drafts second choices, each of them likely enough."""
    return Plan(2, lengths, second_choices=SecondChoices((rate,) * num_rates, (rate,) * num_rates, -1.0, most))


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan(4, (1, 1)), r"a plan's exit_layer must be None or lie in 0\.\.3 \(0: lookup\), got 4"),
        (Plan(-1, (1, 1)), r"a plan's exit_layer must be None or lie in 0\.\.3 \(0: lookup\), got -1"),
        (Plan(0, (1,)), r"a plan's draft_lengths must be one per row, 2, got 1"),
        (Plan(2, (1,)), r"a plan's draft_lengths must be one per row, 2, got 1"),
        (Plan(2, (1, -1)), r"a plan's draft length must be a whole number of at least 0, got -1"),
        (Plan(2, (1, 1), num_rounds=0), r"a plan's num_rounds must be a whole number of at least 1, got 0"),
        (Plan(2, (1, 1), deadline=-1.0), r"a plan's deadline must be seconds, at least 0, or None, got -1\.0"),
        (Plan(2.5, (1, 1)), r"a plan's exit_layer must be a whole number, got 2\.5"),
        (None, r"a policy must make plans of class selfspec\.Plan, got None"),
        (beside(1, 0.5, 4), r"a plan's second_choices must have rates of first and of second choices, 12 each, got"),
        (beside(NUM_BINS, float("nan"), 4), r"a plan's second_choices must have rates of first and of second"),
        (beside(NUM_BINS, 0.5, 1.5), r"a plan's second_choices' most must be a whole number, got 1\.5"),
        (Plan(None, (), lookups=always((3,))), r"a plan's lookups must have lengths and gains of every row, 2, by 30"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_in_a_sentence(plan, sentence):
    with pytest.raises(ValueError, match=sentence):
        decode(tiny("llama"), make_prompts([4, 4]), Once(plan), max_new_tokens=5)


@pytest.mark.parametrize("exit_layer", [0, 2])
@pytest.mark.parametrize("num_rounds", [1, 9])
def test_drafts_longer_than_a_row_has_room_for_are_cut(exit_layer, num_rounds):
    [prompt] = make_prompts([4])
    [done] = decode(tiny("llama"), [prompt], Once(Plan(exit_layer, (30,), num_rounds=num_rounds)), max_new_tokens=5)
    assert done.tokens == generate(tiny("llama").model, prompt, 5)


@pytest.mark.parametrize("keep_logits", [False, True])
def test_a_plan_without_an_exit_needs_no_lengths(keep_logits):
    [prompt] = make_prompts([4])
    [done] = decode(tiny("llama"), [prompt], Once(Plan(None, ())), max_new_tokens=5, keep_logits=keep_logits)
    assert done.tokens == generate(tiny("llama").model, prompt, 5)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, np.array([3]), num_rounds=np.int64(4), deadline=np.float32(1)),
        Plan(np.int64(2), (np.int64(3),), num_rounds=4),
        Plan(0, [3], num_rounds=4),
        Plan(0, (1 << 70,), num_rounds=1 << 70, deadline=float("inf")),
        Plan(True, (True,)),
        beside(NUM_BINS, 0.5, np.int64(2), (3,)),
        beside(NUM_BINS, 0.5, 1 << 40, (3,)),
    ],
)
@pytest.mark.parametrize("engine", ["views", "compiled"])
def test_a_plans_numbers_may_be_numpys_and_of_any_size(plan, engine):
    [prompt] = make_prompts([9])
    [done] = decode(tiny("llama", engine=engine), [prompt * 2], Once(plan), max_new_tokens=12)
    assert done.tokens == generate(tiny("llama").model, prompt * 2, 12)
    assert done.stats.num_draft_tokens > 0


def test_the_policy_of_the_documentation_drafts_and_changes_no_token():
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text("utf-8")
    example = page[page.index("import selfspec\n") : page.index("```", page.index("class Half("))]
    known = {}
    exec(example, known)
    llm, params = known["llm"], selfspec.SamplingParams(max_tokens=16)
    [wanted] = llm.with_speculative(SpeculativeConfig(policy="plain")).generate("def mean(values):", params)
    [got] = llm.generate("def mean(values):", params)
    assert got.outputs[0].token_ids == wanted.outputs[0].token_ids and got.outputs[0].stats.num_draft_tokens > 0
