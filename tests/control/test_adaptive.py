"""The default policy, driven through replay: when it drafts, when it stops, what it spends on looking."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.replay import replay
from selfspec.control.acceptance import Tracker, is_prior
from selfspec.control.adaptive import Adaptive
from selfspec.control.cost_table import Table
from selfspec.control.plan import LOOKUP, Plan
from selfspec.control.round_costs import MOST, RoundCosts
from selfspec.control.rows import RoundOutcome, RowOutcome, RowState, StageSeconds, Tally
from selfspec.decoding.checks import check_lookups, check_plan
from tests.control.rounds import Found, play
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
    assert any((round_.plan.speedup or 1) > 1.1 * limits[-1] for round_ in rounds)
    for round_ in rounds:  # limits fall a little as the context grows
        assert all(limits[layer - 1] >= 0.9 * (round_.plan.speedup or 1) for layer in round_.plan.shadow.layers)


def test_only_layers_to_choose_from_are_looked_at_in_prompts():
    policy = Adaptive(made_up_costs(LAYERS), exit_layers=[2, 3])
    assert policy.seed_layers(RowState(0, 100, 10_000)) == (2, 3)


@pytest.mark.parametrize("reading", [0.0, -1.0, float("nan")])
def test_a_clock_that_stands_or_runs_backwards_changes_nothing(reading):
    costs, policy = made_up_costs(LAYERS), Adaptive(made_up_costs(LAYERS))
    rounds = play(policy, costs, 90, slower=lambda plan: reading)
    assert rounds[-1].num_drafted > 0 and math.isfinite(rounds[-1].plan.stop.least)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_plans_are_always_allowed(data):
    rows = data.draw(st.integers(1, 5))
    policy = Adaptive(made_up_costs(LAYERS), most=data.draw(st.sampled_from([None, 1, 5])))
    for _ in range(data.draw(st.integers(1, 30))):
        plan = policy.plan([RowState(i, 40, data.draw(st.integers(1, 30)), Found()) for i in range(rows)])
        check_plan(plan, rows, LAYERS)
        if plan.lookups is not None:
            check_lookups(plan.lookups, rows)
        rounds = []
        for _ in range(data.draw(st.integers(1, min(3, plan.num_rounds)))):
            exit_layer = data.draw(st.sampled_from([plan.exit_layer, LOOKUP] if plan.lookups else [plan.exit_layer]))
            outcomes = []
            for i, n in enumerate(plan.draft_lengths):
                drafted = data.draw(st.integers(0, n if exit_layer else 4 if exit_layer == LOOKUP else 0))
                sure = (data.draw(st.floats(0, 1)),) * drafted if exit_layer else ()
                match = data.draw(st.integers(1, 200)) if exit_layer == LOOKUP and drafted else 0
                outcomes.append(RowOutcome(i, drafted, data.draw(st.integers(0, drafted)), sure, match=match))
            seconds = StageSeconds(draft=1e-3, verify=data.draw(st.floats(0, 1)), head=1e-4)
            rounds.append(RoundOutcome(exit_layer, outcomes, seconds))
        policy.observe(plan, rounds)


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
        num_rounds=plan.num_rounds,
        lookups=plan.lookups,
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
    costs = made_up_costs(LAYERS)
    rounds = play(Adaptive(costs, drafts=["exit"]), costs, 40, lambda plan, n: n if right else 0)
    lengths = [round_.num_drafted for round_ in rounds]
    assert 0 < lengths[0] <= 4
    assert lengths[-1] > 8 if right else 0 < sum(lengths) <= 64


def test_a_drafter_that_the_clock_finds_slower_than_the_table_is_given_up_and_the_ratio_is_kept():
    costs, state = made_up_costs(LAYERS), None
    for dear, drafts, num_rounds in ((2.5, False, 1000), (1.0, True, 4000)):
        policy = Adaptive(costs, state, drafts=("exit",))
        rounds = play(policy, costs, num_rounds, lambda plan, n: n // 2, lambda plan, dear=dear: dear, most=2)
        drafting = sum(round_.exit_layer is not None for round_ in rounds[-300:])
        assert drafting > 250 if drafts else drafting < 30  # now and then it tries again
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


class AlwaysFound(Found):
    """What lookup finds of a row that repeats itself."""

    def take_tally(self):
        return Tally(30, [0] * 7 + [20, 0, 0], [0] * 7 + [20, 0, 0])


def test_rounds_that_draft_are_compared_with_plain_ones_now_and_then():
    costs = replace(made_up_costs(LAYERS), short=Table.of({1: 1e-3, 64: 2e-2}))  # probes are dear, and far apart
    rounds = play(Adaptive(costs, drafts=["exit"]), costs, 400)
    plain = [round_ for round_ in rounds[20:] if round_.exit_layer is None]
    assert 0 < len(plain) < 20


@pytest.mark.parametrize("drafts", [["lookup"], ["lookup", "exit"]])
def test_layers_that_wait_to_be_probed_do_not_hold_up_rounds_by_lookup(drafts):
    costs = made_up_costs(LAYERS)
    rounds = play(Adaptive(costs, drafts=drafts), costs, 400, lookup=AlwaysFound(100))[100:]
    assert sum(round_.exit_layer == LOOKUP for round_ in rounds) > 250
    assert sum(round_.is_first for round_ in rounds) < 100


def test_exit_layers_may_be_given_in_any_order():
    costs = made_up_costs(LAYERS)
    rounds = play(Adaptive(costs, exit_layers=[3, 1, 2, 3], drafts=["exit"]), costs, 100)
    assert any(round_.plan.shadow is not None for round_ in rounds)


def test_a_decision_that_is_interrupted_is_made_again(monkeypatch):
    """Else it would go on with a lookup table of the rows before."""
    policy = Adaptive(made_up_costs(LAYERS))
    policy.plan([RowState(i, 50, 50) for i in range(2)])
    later = [RowState(1, 52, 48)]
    with monkeypatch.context() as patch:
        patch.setattr(Adaptive, "_table", interrupt)
        with pytest.raises(KeyboardInterrupt):
            policy.plan(later)
    before = policy.decision
    plan = policy.plan(later)
    assert policy.decision is not before and len(plan.draft_lengths) == 1
    assert plan.lookups is None or len(plan.lookups.lengths) == 1


def interrupt(*given):
    raise KeyboardInterrupt
