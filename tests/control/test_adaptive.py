"""The default policy, driven through replay: when it drafts, when it stops, what it spends on looking."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.replay import replay
from selfspec.control.acceptance import Tracker, is_prior
from selfspec.control.adaptive import Adaptive
from selfspec.control.cost_table import Table
from selfspec.control.laps import Seconds
from selfspec.control.plan import LOOKUP, Plan
from selfspec.control.round_costs import MOST, RoundCosts
from selfspec.control.rows import RowOutcome, RowState, Shadow, Tally
from selfspec.decoding.checks import check_plan
from tests.eval.replays import made_up_costs, trace_of

LAYERS = 8


def traces(acceptance, count=4, tokens=256, informative=True, layers=LAYERS):
    """All layers right equally often, with confidences that tell of it, or that do not."""
    made = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        hits = rng.random((layers - 1, tokens)) < acceptance
        sure = rng.random(hits.shape, np.float32)
        if informative:
            sure = np.where(hits, 0.5 + 0.5 * sure, 0.7 * sure).astype(np.float32)
        made.append(trace_of(hits, sure, rng, prompt_length=33))
        made[-1].short_hits[:], made[-1].short_confidences[:] = hits, sure
        made[-1].prompt_hits[:] = rng.random(made[-1].prompt_hits.shape) < acceptance
    return made


def speedup(acceptance, **kinds):
    costs = made_up_costs(LAYERS)
    runs = [replay([trace], Adaptive(costs), costs) for trace in traces(acceptance, **kinds)]
    return sum(run.plain_seconds for run in runs) / sum(run.seconds for run in runs)


@pytest.mark.parametrize("informative", [True, False])
@pytest.mark.parametrize("acceptance", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1])
def test_it_costs_next_to_nothing_where_drafts_do_not_pay_and_gains_where_they_do(acceptance, informative):
    assert speedup(acceptance, informative=informative) >= (0.97 if acceptance < 0.8 else 1.5)


def test_drafts_are_as_long_as_was_meant_where_costs_rise_in_steps():
    costs = made_up_costs(LAYERS)
    points = costs.late[1].points
    late = Table(points, tuple(costs.late[1](1) * (4 if n > 12 else 1) for n in points))  # flat, and then far dearer
    costs = replace(costs, late=dict.fromkeys(costs.late, late))
    [trace] = traces(1, count=1)
    rounds = replay([trace], Adaptive(costs, drafts=["exit"]), costs).rounds
    drafted = [round_.rows[0].num_drafted for round_ in rounds[len(rounds) // 2 : -1]]
    assert sum(drafted) > 6 * len(drafted)


def test_it_drafts_nothing_with_layers_that_are_never_right():
    costs = made_up_costs(LAYERS)
    [trace] = traces(0, count=1)
    rounds = replay([trace], Adaptive(costs), costs).rounds
    assert sum(round_.plan.exit_layer is not None for round_ in rounds) <= 8
    assert all(round_.plan.exit_layer is None for round_ in rounds[32:])


def test_it_leaves_at_the_cheapest_of_layers_that_are_always_right_and_drafts_on():
    costs = made_up_costs(LAYERS)
    [trace] = traces(1, count=1)
    rounds = replay([trace], Adaptive(costs), costs).rounds[8:-1]
    assert {round_.plan.exit_layer for round_ in rounds} == {1}
    assert all(round_.rows[0].num_drafted == MOST for round_ in rounds)


def test_it_comes_back_when_drafts_begin_to_pay():
    costs = made_up_costs(LAYERS)
    [bad], [good] = traces(0, count=1, tokens=300), traces(1, count=1, tokens=900)
    both = trace_of(
        np.concatenate((bad.hits, good.hits), 1),
        np.concatenate((bad.confidences, good.confidences), 1),
        np.random.default_rng(0),
        prompt_length=33,
    )
    both.short_hits[:], both.short_confidences[:] = both.hits, both.confidences
    both.seconds[:] = False  # else drafts pay from the first on: for what is drafted beside them
    rounds = replay([both], Adaptive(costs), costs).rounds
    assert rounds[200].plan.exit_layer is None and rounds[-2].plan.exit_layer is not None


def test_an_exit_layer_and_a_longest_draft_can_be_given():
    costs = made_up_costs(LAYERS)
    [trace] = traces(1, count=1)
    rounds = replay([trace], Adaptive(costs, exit_layers=[3], most=5), costs).rounds
    assert {round_.plan.exit_layer for round_ in rounds} <= {3, None}
    assert max(row.num_drafted for round_ in rounds for row in round_.rows) == 5


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_looking_at_other_layers_stays_within_its_share(batch_size):
    costs = made_up_costs(LAYERS, rows=(1, 4, 16))
    run = replay(traces(0.7, count=16), Adaptive(costs), costs, batch_size)
    looked = sum(
        costs.shadow(
            len(round_.plan.shadow.layers), sum(round_.rows[i].num_accepted + 1 for i in round_.plan.shadow.rows)
        )
        for round_ in run.rounds
        if round_.plan.shadow is not None
    )
    assert 0 < looked < 0.03 * run.seconds
    assert all(len(round_.plan.shadow.rows) <= 4 for round_ in run.rounds if round_.plan.shadow)


def test_a_prompt_is_looked_at_as_far_as_the_output_can_pay_for_it():
    dear = Adaptive(made_up_costs(LAYERS, head=1.0))
    assert dear.seed_layers(RowState(0, 100, 20)) == ()
    for room, layers in ((1, ()), (10_000, tuple(range(1, LAYERS)))):
        assert Adaptive(made_up_costs(LAYERS)).seed_layers(RowState(0, 100, room)) == layers


def test_layers_are_looked_at_only_where_being_always_right_would_pay():
    costs = made_up_costs(LAYERS)
    limits = RoundCosts(costs, 1).limits() * costs.plain_round(1)
    rounds = [round_ for round_ in replay(traces(0.8, count=1), Adaptive(costs), costs).rounds if round_.plan.shadow]
    assert any(round_.plan.speedup > 1.1 * limits[-1] for round_ in rounds)
    for round_ in rounds:  # limits fall a little as the context grows
        assert all(limits[layer - 1] >= 0.9 * round_.plan.speedup for layer in round_.plan.shadow.layers)


def test_only_layers_to_choose_from_are_looked_at_in_prompts():
    policy = Adaptive(made_up_costs(LAYERS), exit_layers=[2, 3])
    assert policy.seed_layers(RowState(0, 100, 10_000)) == (2, 3)


@pytest.mark.parametrize("reading", [0.0, -1.0, float("nan")])
def test_a_clock_that_stands_or_runs_backwards_changes_nothing(reading):
    costs, policy = made_up_costs(LAYERS), Adaptive(made_up_costs(LAYERS))
    for _ in range(90):
        plan = policy.plan([RowState(0, 50, 500)])
        layers = plan.shadow.layers if plan.shadow else ()
        shadow = Shadow(layers, np.full((len(layers), 3), True), np.full((len(layers), 3), 0.9, np.float32))
        drafted = plan.draft_lengths[0]
        seconds = Seconds(*[reading] * 8)
        policy.observe(plan, [RowOutcome(0, drafted, drafted, (0.9,) * drafted, shadow=shadow)], seconds)
    assert plan.exit_layer is not None and plan.draft_lengths[0] > 0
    assert math.isfinite(plan.stop.least)
    assert costs.num_layers == LAYERS


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_plans_are_always_allowed(data):
    rows = data.draw(st.integers(1, 5))
    policy = Adaptive(made_up_costs(LAYERS))
    for _ in range(data.draw(st.integers(1, 30))):
        states = [RowState(i, 40, data.draw(st.integers(1, 30))) for i in range(rows)]
        plan = policy.plan(states)
        assert plan.exit_layer is None or 1 <= plan.exit_layer < LAYERS
        assert all(0 <= length < state.room for length, state in zip(plan.draft_lengths, states, strict=True))
        drafted = [data.draw(st.integers(0, n)) if n else 0 for n in plan.draft_lengths]
        outcomes = [
            RowOutcome(i, n, data.draw(st.integers(0, n)), (data.draw(st.floats(0, 1)),) * n)
            for i, n in enumerate(drafted)
        ]
        policy.observe(plan, outcomes, Seconds(draft=1e-3, verify=data.draw(st.floats(0, 1)), head=1e-4))


def test_a_prior_of_the_same_model_is_where_it_starts():
    tracker = Tracker(LAYERS)
    for _ in range(50):
        tracker.add(2, [True] * 4, [0.9] * 4)
        tracker.add(1, [False] * 4, [0.9] * 4)
    plan = Adaptive(made_up_costs(LAYERS), tracker.state()).plan([RowState(0, 2, 100)])
    assert plan == Plan(
        2,
        plan.draft_lengths,
        stop=plan.stop,
        keep_confidence=True,
        shadow=plan.shadow,
        second_choices=plan.second_choices,
        speedup=plan.speedup,
    )
    assert plan.speedup > 1.1 and plan.second_choices.right == plan.stop.calibration


def test_it_learns_while_decoding_that_early_passes_are_dearer_than_its_table_says():
    costs = made_up_costs(LAYERS)
    dear = replace(costs, early={rows: table.scaled(1.8) for rows, table in costs.early.items()})
    wrong, right = (
        sum(replay([trace], Adaptive(told), dear).seconds for trace in traces(0.8)) for told in (costs, dear)
    )
    assert wrong < 1.08 * right  # 1.12 where it believes the table


@pytest.mark.parametrize("right", [True, False])
def test_a_layer_of_which_nothing_is_known_drafts_little_until_it_is(right):
    policy, lengths = Adaptive(made_up_costs(LAYERS), drafts=["exit"]), []
    for _ in range(40):
        plan = policy.plan([RowState(0, 40, 100)])
        drafted = plan.draft_lengths[0]
        lengths.append(drafted)
        outcome = RowOutcome(0, drafted, drafted if right else 0, (0.9,) * drafted)
        policy.observe(plan, [outcome], Seconds(draft=1e-3, verify=1e-3, head=1e-4))
    assert 0 < lengths[0] <= 6
    assert lengths[-1] > 8 if right else 0 < sum(lengths) <= 64


def test_a_plan_holds_for_the_rounds_that_it_says_if_nothing_is_looked_up():
    """What the policy says of the next rounds is what it plans in them."""
    costs, policy = made_up_costs(LAYERS), Adaptive(made_up_costs(LAYERS), drafts=("exit",))
    held, before = 0, None
    for at in range(300):
        plan = policy.plan([RowState(0, 50 + at, 5000 - at)])
        if held:
            assert (plan.exit_layer, plan.shadow, plan.stop) == (before.exit_layer, None, before.stop)
        held, before = held - 1 if held else policy.steady.num_rounds, plan
        n = plan.draft_lengths[0]
        took = costs.stages(plan.exit_layer, [n])
        policy.observe(plan, [RowOutcome(0, n, n // 2, (0.9,) * n)], Seconds(**took))


def test_a_drafter_that_the_clock_finds_slower_than_the_table_is_given_up_and_the_ratio_is_kept():
    costs, state = made_up_costs(LAYERS), None
    for dear, drafts, rounds in ((2.5, False, 1000), (1.0, True, 4000)):
        policy = Adaptive(costs, state, drafts=("exit",))
        plans = []
        for _ in range(rounds):
            plan = policy.plan([RowState(0, 50, 5000)])
            n = min(2, plan.draft_lengths[0])
            took = costs.stages(plan.exit_layer, [n])
            if plan.exit_layer is not None:
                took = {name: dear * taken for name, taken in took.items()}
            policy.observe(plan, [RowOutcome(0, n, n // 2, (0.9,) * n)], Seconds(**took))
            plans.append(plan)
        assert any(plan.exit_layer for plan in plans[-60:]) == drafts
        if dear > 1:
            state = policy.state()
            assert Adaptive(costs, state, drafts=("exit",)).plan([RowState(0, 50, 5000)]).exit_layer is None


def test_state_is_plain_numbers_and_others_are_passed_over():
    costs = made_up_costs(LAYERS)
    policy = Adaptive(costs)
    replay(traces(0.8), policy, costs)
    state = json.loads(json.dumps(policy.state()))
    assert is_prior(state, LAYERS)
    for damage in ({"correction": {"table": [1], "ratios": 3}}, {"agreement": "none"}, {"correction": None}):
        assert Adaptive(costs, state | damage).plan([RowState(0, 50, 500)]) is not None


class AlwaysFound:
    """What is free to guess of a row that repeats itself."""

    match, is_own, is_stored, guessed = 100, True, False, ()

    def take_tally(self):
        return Tally(30, [0] * 7 + [20], [0] * 7 + [20])


def all_right(policy, costs, count, guesses=None):
    """(plan, what the policy promises after it) of rounds of one row whose drafts are all right."""
    length = 100
    for _ in range(count):
        plan = policy.plan([RowState(0, length, 100_000 - length, guesses)])
        check_plan(plan, 1, costs.num_layers)
        yield plan, policy.steady
        drafted, layers = plan.draft_lengths[0], plan.shadow.layers if plan.shadow else ()
        shadow = Shadow(layers, np.full((len(layers), 3), True), np.full((len(layers), 3), 0.9, np.float32))
        outcome = RowOutcome(0, drafted, drafted, (0.99,) * drafted if plan.exit_layer else (), (), shadow)
        seconds = Seconds(verify=costs.round(plan.exit_layer, plan.draft_lengths))
        policy.observe(plan, [outcome], seconds)
        length += outcome.num_emitted


def test_rounds_that_are_promised_come_also_after_those_that_are_compared():
    costs = replace(made_up_costs(LAYERS), short=Table.of({1: 1e-3, 64: 2e-2}))  # probes are dear, and far apart
    rounds = list(all_right(Adaptive(costs, drafts=["exit"]), costs, 400))
    drafts = [plan.exit_layer is not None for plan, _ in rounds]
    assert any(before and not after for before, after in pairwise(drafts))  # some are compared
    promised = [(plan, after) for (plan, steady), (after, _) in pairwise(rounds) if steady.num_rounds]
    assert len(promised) > 100 and all(plan == after for plan, after in promised)


@pytest.mark.parametrize("drafts", [["lookup"], ["lookup", "exit"]])
def test_layers_that_wait_to_be_probed_do_not_hold_up_rounds_by_lookup(drafts):
    costs = made_up_costs(LAYERS)
    rounds = list(all_right(Adaptive(costs, drafts=drafts), costs, 400, AlwaysFound()))[100:]
    looked_up = [steady for plan, steady in rounds if plan.exit_layer == LOOKUP]
    assert len(looked_up) > 200 and sum(steady.num_rounds > 0 for steady in looked_up) > len(looked_up) / 2
    if "exit" in drafts:  # the next round that lookup does not draft is one of a probe: the policy has to be asked
        assert all(steady.lengths[0] < 0 for steady in looked_up if steady.num_rounds)


def test_exit_layers_may_be_given_in_any_order():
    costs = made_up_costs(LAYERS)
    rounds = list(all_right(Adaptive(costs, exit_layers=[3, 1, 2, 3], drafts=["exit"]), costs, 100))
    assert any(plan.shadow is not None for plan, _ in rounds)
