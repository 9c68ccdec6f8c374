"""Policies that see plain rounds ahead are not asked about them: who is asked when, and that it changes nothing."""

from __future__ import annotations

import pytest

from selfspec.api import Target
from selfspec.control.adaptive import Adaptive
from selfspec.control.plan import Plan, RowOutcome, RowState, Seconds
from selfspec.decoding.engine import Engine
from tests.eval.replays import made_up_costs
from tests.helpers import generate, make_prompts
from tests.models import build

LAYERS = 8


class Patient:
    """Plain decoding, asked about one round in a few."""

    reads_lookup = True

    def __init__(self, ahead):
        self.plain_ahead = ahead
        self.asked, self.told, self.passed = [], 0, []

    def plan(self, rows):
        self.asked.append([row.request_id for row in rows])
        assert all(row.match >= 0 and row.guesses is not None for row in rows)
        return Plan(None, (0,) * len(rows))

    def pass_plain(self, num_rounds, seconds):
        assert seconds > 0
        self.passed.append(num_rounds)

    def observe(self, plan, outcomes, seconds):
        assert all(outcome.looked is not None for outcome in outcomes)
        self.told += 1


def decode(policy, lengths, num_tokens, **options):
    target, prompts = Target(build("llama")), make_prompts(lengths)
    engine = Engine(target, policy=policy, **options)
    for prompt, count in zip(prompts, num_tokens, strict=True):
        engine.submit(prompt, max_new_tokens=count)
    done = [row.completion for round_ in engine.run() for row in round_.rows if row.completion is not None]
    tokens = [one.tokens for one in sorted(done, key=lambda one: one.request_id)]
    assert tokens == [generate(target.model, p, n) for p, n in zip(prompts, num_tokens, strict=True)]


@pytest.mark.parametrize(("ahead", "passed"), [(0, []), (5, [5, 5, 5]), (100, [])])
def test_it_is_asked_once_for_all_rounds_ahead_and_told_how_many_came(ahead, passed):
    policy = Patient(ahead)
    decode(policy, [7], [24])
    assert len(policy.asked) == policy.told == -(-24 // (ahead + 1))
    assert policy.passed == passed


def test_it_is_asked_when_rows_leave():
    policy = Patient(100)
    decode(policy, [7, 12], [8, 20])
    assert policy.asked == [[0, 1], [1]] and policy.passed == [7]


def test_it_is_asked_when_another_row_takes_the_place_of_one():
    policy = Patient(100)
    decode(policy, [7, 5], [8, 6], max_batch_size=1)
    assert policy.asked == [[0], [1]] and policy.passed == [7]


def plans(policy, num_rounds, skips):
    """What it plans for a model whose layers are never right, asked about every round or about those it wants to be."""
    made, at, seconds = [], 0, {"verify": 1e-3, "head": 1e-4}
    while len(made) < num_rounds:
        plan = policy.plan([RowState(0, 40 + at, 4000 - at)])
        drafted = plan.draft_lengths[0]
        outcome = RowOutcome(0, drafted, 0, (0.9,) * drafted)
        more = {"draft": 1e-3 if plan.exit_layer else 0.0, "shadow": 2e-4 if plan.shadow else 0.0}
        policy.observe(plan, [outcome], Seconds(**seconds, **more))
        made.append(plan.exit_layer)
        at += 1
        ahead = policy.plain_ahead if skips else 0
        if ahead:
            policy.pass_plain(ahead, ahead * 1e-3)
            made += [None] * ahead
            at += ahead
    return made[:num_rounds], len(made)


def test_the_default_policy_plans_the_same_whether_it_is_asked_about_them_or_not():
    one, other = (Adaptive(made_up_costs(LAYERS)) for _ in range(2))
    asked, skipped = plans(one, 600, False), plans(other, 600, True)
    assert asked[0] == skipped[0]
    assert None in asked[0] and any(layer is not None for layer in asked[0])


def test_the_default_policy_is_seldom_asked_where_drafts_do_not_pay():
    policy, asked = Adaptive(made_up_costs(LAYERS)), []
    honest = policy.plan
    policy.plan = lambda rows: asked.append(rows) or honest(rows)
    plans(policy, 600, True)
    assert len(asked) < 300
