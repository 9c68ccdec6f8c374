"""What policies see of sequences and rounds, and plans that cannot be carried out, or are carried out in part."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import selfspec
from selfspec import LLM, SamplingParams, SpeculativeConfig
from selfspec.control.plan import Policy, always
from selfspec.core import Plan
from tests.models import build

PROMPTS = [[5, 17, 60, 33], [71, 8, 8, 90, 12, 44, 9, 3, 25]]


def generate(policy, prompts=PROMPTS, max_tokens=12, backend="views", **more):
    llm = LLM(build("llama"), backend=backend, speculative=SpeculativeConfig(policy=policy), **more)
    return [output.outputs[0] for output in llm.generate(prompts, SamplingParams(max_tokens=max_tokens))]


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


class Once(Policy):
    """A policy of one plan, good or bad."""

    def __init__(self, plan):
        self.made = plan

    def plan(self, rows):
        return self.made


def test_a_policy_sees_every_sequence_and_what_became_of_its_plan():
    class Watching(Policy):
        states, rounds = [], []

        def plan(self, rows):
            self.states.append([(row.seq_id, row.num_tokens, row.num_remaining) for row in rows])
            return Plan(2, (3,) * len(rows))

        def observe(self, plan, rounds):
            self.rounds.append((plan, rounds))

    policy = Watching()
    done = generate(policy, max_tokens=9)
    lengths, limits = {}, {}
    for states, (plan, [round_]) in zip(policy.states, policy.rounds, strict=True):
        assert [row.seq_id for row in round_.rows] == [seq_id for seq_id, *_ in states]
        assert round_.plan == plan
        for (seq_id, num_tokens, num_remaining), row in zip(states, round_.rows, strict=True):
            assert lengths.setdefault(seq_id, num_tokens) == num_tokens
            assert limits.setdefault(seq_id, num_tokens + num_remaining) == num_tokens + num_remaining
            assert row.num_accepted <= row.num_drafted <= min(3, num_remaining - 1)
            lengths[seq_id] += len(row.token_ids)
    assert lengths == limits and [len(one.token_ids) for one in done] == [9, 9]


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan(4, (1, 1)), r"a plan's exit_layer must be None or lie in 0\.\.3 \(0: lookup\), got 4"),
        (Plan(-1, (1, 1)), r"a plan's exit_layer must be None or lie in 0\.\.3 \(0: lookup\), got -1"),
        (Plan(0, (1,)), r"a plan's draft_lengths must be one per row, 2, got 1"),
        (Plan(2, (1, -1)), r"a plan's draft length must be a whole number of at least 0, got -1"),
        (Plan(2, (1, 1), num_rounds=0), r"a plan's num_rounds must be a whole number of at least 1, got 0"),
        (Plan(2, (1, 1), deadline=-1.0), r"a plan's deadline must be seconds, at least 0, or None, got -1\.0"),
        (Plan(2.5, (1, 1)), r"a plan's exit_layer must be a whole number, got 2\.5"),
        (None, r"a policy must make plans of class selfspec\.Plan, got None"),
        (Plan(None, (), lookups=always((3,))), r"a plan's lookups must have lengths and gains of every row, 2, by 30"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_in_a_sentence(plan, sentence):
    with pytest.raises(ValueError, match=sentence):
        generate(Once(plan))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(0, (30,)),
        Plan(2, (30,), num_rounds=9),
        Plan(None, ()),
        Plan(2, np.array([3]), num_rounds=np.int64(4), deadline=np.float32(1)),
        Plan(np.int64(2), (np.int64(3),), num_rounds=4),
        Plan(0, [3], num_rounds=4),
        Plan(0, (1 << 70,), num_rounds=1 << 70, deadline=float("inf")),
    ],
)
@pytest.mark.parametrize("backend", ["views", "compiled"])
def test_drafts_are_cut_to_what_a_row_may_emit_and_numbers_may_be_numpys_and_of_any_size(plan, backend):
    prompts = [PROMPTS[1] * 2]
    [done] = generate(Once(plan), prompts, backend=backend)
    assert [done.token_ids] == tokens_of(generate("plain", prompts, backend=backend))
    assert done.stats.num_draft_tokens > 0 or plan.exit_layer is None


def test_the_policy_of_the_documentation_drafts_and_changes_no_token():
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text("utf-8")
    example = page[page.index("import selfspec\n") : page.index("```", page.index("class Half("))]
    known = {}
    exec(example, known)
    llm, params = known["llm"], selfspec.SamplingParams(max_tokens=16)
    [wanted] = llm.with_speculative(SpeculativeConfig(policy="plain")).generate("def mean(values):", params)
    [got] = llm.generate("def mean(values):", params)
    assert got.outputs[0].token_ids == wanted.outputs[0].token_ids and got.outputs[0].stats.num_draft_tokens > 0


def test_the_time_in_which_a_policy_takes_outcomes_counts_with_the_next_round():
    control = []

    class Slow(Policy):
        def plan(self, rows):
            return Plan(None, (0,) * len(rows))

        def observe(self, plan, rounds):
            control.append(rounds[0].seconds.control)
            time.sleep(0.02)

    generate(Slow(), max_tokens=4)
    assert all(seconds >= 0.02 for seconds in control[1:]) and len(control) > 2
