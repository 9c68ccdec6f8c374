"""Plans: what an engine refuses, what it cuts, and what policies see of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import selfspec
from selfspec import SpeculativeConfig
from selfspec.control.plan import NUM_BINS, Alternatives, Policy, always
from selfspec.core import Plan, SamplingParams
from tests.helpers import Schedule, decode, generate, make_prompts, request
from tests.models import tiny

FIVE = SamplingParams(max_tokens=5)


def test_a_policy_sees_every_row_and_what_became_of_its_plan():
    class Watching(Schedule):
        def plan(self, rows):
            self.rows_seen = [*getattr(self, "rows_seen", []), [(row.seq_id, row.num_tokens) for row in rows]]
            assert all(row.num_remaining == {0: 11, 1: 20}[row.seq_id] - row.num_tokens for row in rows)
            assert not any(row.has_processors for row in rows), "penalties are none"
            return super().plan(rows)

    policy, prompts = Watching(0, 4), make_prompts([5, 9])
    params = [SamplingParams(max_tokens=n, repetition_penalty=1.1) for n in (6, 11)]
    done = decode(tiny("llama"), prompts, policy, params)
    assert len(policy.rows_seen) == len(policy.seen)
    lengths = {0: 5, 1: 9}
    for states, (plan, [round_]) in zip(policy.rows_seen, policy.seen, strict=True):
        assert [row.seq_id for row in round_.rows] == [seq_id for seq_id, _ in states]
        for (seq_id, num_tokens), row, planned in zip(states, round_.rows, plan.draft_lengths, strict=True):
            assert num_tokens == lengths[seq_id]
            assert row.num_accepted <= row.num_drafted <= planned
            lengths[seq_id] += row.num_emitted
    assert lengths == {0: 11, 1: 20}
    assert [len(one.token_ids) for one in done] == [6, 11]


class Once(Policy):
    """A policy of one plan, good or bad."""

    def __init__(self, plan):
        self.made = plan

    def plan(self, rows):
        return self.made


def branched(num_rates, rate, most, lengths=(2, 2)):
    """A plan of one layer that drafts alternatives, each of them likely enough."""
    return Plan(2, lengths, alternatives=Alternatives((rate,) * num_rates, (rate,) * num_rates, -1.0, most))


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
        (branched(1, 0.5, 4), r"a plan's alternatives must have rates of first and of second choices, 12 each, got"),
        (branched(NUM_BINS, float("nan"), 4), r"a plan's alternatives must have rates of first and of second"),
        (branched(NUM_BINS, 0.5, 1.5), r"a plan's alternatives' most must be a whole number, got 1\.5"),
        (Plan(None, (), lookups=always((3,))), r"a plan's lookups must have lengths and gains of every row, 2, by 30"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_in_a_sentence(plan, sentence):
    with pytest.raises(ValueError, match=sentence):
        decode(tiny("llama"), make_prompts([4, 4]), Once(plan), FIVE)


@pytest.mark.parametrize("exit_layer", [0, 2])
@pytest.mark.parametrize("num_rounds", [1, 9])
def test_drafts_longer_than_a_row_has_room_for_are_cut(exit_layer, num_rounds):
    [prompt] = make_prompts([4])
    [done] = decode(tiny("llama"), [prompt], Once(Plan(exit_layer, (30,), num_rounds=num_rounds)), FIVE)
    assert done.token_ids == generate(tiny("llama").model, prompt, 5)


@pytest.mark.parametrize("keep_logits", [False, True])
def test_a_plan_without_an_exit_needs_no_lengths(keep_logits):
    [prompt] = make_prompts([4])
    [done] = decode(tiny("llama"), [request(prompt, FIVE, keep_logits=keep_logits)], Once(Plan(None, ())))
    assert done.token_ids == generate(tiny("llama").model, prompt, 5)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(2, np.array([3]), num_rounds=np.int64(4), deadline=np.float32(1)),
        Plan(np.int64(2), (np.int64(3),), num_rounds=4),
        Plan(0, [3], num_rounds=4),
        Plan(0, (1 << 70,), num_rounds=1 << 70, deadline=float("inf")),
        Plan(True, (True,)),
        branched(NUM_BINS, 0.5, np.int64(2), (3,)),
        branched(NUM_BINS, 0.5, 1 << 40, (3,)),
    ],
)
@pytest.mark.parametrize("backend", ["views", "compiled"])
def test_a_plans_numbers_may_be_numpys_and_of_any_size(plan, backend):
    [prompt] = make_prompts([9])
    [done] = decode(tiny("llama", backend=backend), [prompt * 2], Once(plan), SamplingParams(max_tokens=12))
    assert done.token_ids == generate(tiny("llama").model, prompt * 2, 12)
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
