"""The default policy in simulated rounds: when it drafts, when it stops, and what it spends on probes."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.control.acceptance import Tracker, is_prior
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Table
from selfspec.control.drafters import MOST
from selfspec.control.plan import NUM_BINS, NUM_LOOKUP_BINS
from selfspec.control.planner import Candidates
from selfspec.core import LOOKUP, Plan, RoundOutput, StageSeconds
from tests.control.rounds import (
    LAYERS,
    Match,
    Repetition,
    Tally,
    Text,
    decode,
    even_costs,
    play,
    row_round,
    sequence,
    settled,
    tell,
    texts,
    times_of,
)
from tests.slow import slow


@pytest.mark.parametrize("is_informative", [True, False])
@pytest.mark.parametrize("acceptance", [0, slow(0.1), slow(0.2), 0.4, slow(0.6), slow(0.7), 0.8, slow(0.9), 1])
def test_it_costs_next_to_nothing_where_drafts_do_not_pay_and_gains_where_they_do(acceptance, is_informative):
    costs = even_costs()
    runs = [decode(Adaptive(costs), costs, [text]) for text in texts(acceptance, is_informative=is_informative)]
    speedup = sum(run.plain_seconds for run in runs) / sum(run.seconds for run in runs)
    assert speedup >= (0.97 if acceptance < 0.8 else 1.45)


def test_drafts_are_as_long_as_planned_where_costs_rise_in_steps():
    costs = even_costs()
    points, plain = costs.rounds[1].points, costs.plain_round(1)
    rounds = Table(points, tuple(plain * (4 if n > 12 else 1) for n in points))  # flat, then steep
    costs = replace(costs, rounds=dict.fromkeys(costs.rounds, rounds), head=Table.of({1: 0.0}))
    rounds = decode(Adaptive(costs, drafters=["exit"]), costs, texts(1, count=1)).rounds
    drafted = [round_.rows[0].num_drafted for round_ in rounds[len(rounds) // 2 : -1]]
    assert sum(drafted) > 6 * len(drafted)


def test_it_drafts_nothing_with_layers_that_are_never_right():
    costs = even_costs()
    rounds = decode(Adaptive(costs), costs, texts(0, count=1)).rounds
    drafted = [round_.exit_layer is not None for round_ in rounds]
    assert sum(drafted) <= 8 and sum(drafted[32:]) <= 4


def test_of_layers_that_are_always_right_the_cheapest_drafts_the_maximum():
    costs = even_costs()
    rounds = decode(Adaptive(costs), costs, texts(1, count=1, num_tokens=900)).rounds[30:-1]
    drafting = [round_ for round_ in rounds if round_.exit_layer]  # others measure the time of plain rounds
    assert len(drafting) > 15 and {round_.exit_layer for round_ in drafting} == {1}
    assert sum(round_.rows[0].num_drafted == MOST for round_ in drafting) > 0.7 * len(drafting)


def test_it_drafts_again_when_drafts_begin_to_pay():
    costs = even_costs()
    [bad], [good] = texts(0, 1, num_tokens=300), texts(1, 1, num_tokens=900)
    both = Text(*(np.concatenate(pair, 1) for pair in zip(bad, good, strict=True)))
    rounds = decode(Adaptive(costs), costs, [both]).rounds
    assert rounds[200].exit_layer is None and rounds[-2].exit_layer is not None


def test_an_exit_layer_and_a_longest_draft_can_be_given():
    costs = even_costs()
    rounds = decode(Adaptive(costs, exit_layers=[3], most=5), costs, texts(1, count=1)).rounds
    assert {round_.exit_layer for round_ in rounds} <= {3, None}
    assert max(row.num_drafted for round_ in rounds for row in round_.rows) == 5


@pytest.mark.parametrize("drafter", ["exit", "lookup"])
def test_drafts_come_from_where_they_may(drafter):
    costs = even_costs()
    rounds = play(Adaptive(costs, drafters=[drafter]), costs, 200, lookup=Repetition(100))
    allowed = {LOOKUP, None} if drafter == "lookup" else {*range(1, LAYERS), None}
    assert {one.exit_layer for one in rounds} <= allowed and any(one.num_drafted for one in rounds)
    assert any(one.plan.shadow is not None for one in rounds) == (drafter == "exit")


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_probes_stay_within_their_share_of_the_time(batch_size):
    costs = even_costs(rows=(1, 4, 16))
    run = decode(Adaptive(costs), costs, texts(0.7, count=batch_size, num_tokens=500))
    probing = sum(round_.seconds.shadow for round_ in run.rounds)
    assert 0 < probing < 0.03 * run.seconds
    assert all(len(round_.plan.shadow.rows) <= 4 for round_ in run.rounds if round_.plan.shadow)


def test_a_prompt_is_probed_as_far_as_its_output_can_pay_for_it():
    assert Adaptive(even_costs(head=1.0)).seed_layers(sequence(0, 20, 100)) == ()
    for num_remaining, layers in ((1, ()), (10_000, tuple(range(1, LAYERS)))):
        assert Adaptive(even_costs()).seed_layers(sequence(0, num_remaining, 100)) == layers
    assert Adaptive(even_costs(), exit_layers=[2, 3]).seed_layers(sequence(0, 10_000, 100)) == (2, 3)


def test_prompts_are_no_longer_probed_once_a_layer_is_known_well():
    policy = Adaptive(even_costs())
    for _ in range(2):
        assert policy.seed_layers(sequence(0, 10_000, 100))
        policy.tracker.add_draft(2, 60, (0.9,) * 60)
    policy.tracker.pass_time(300)  # of plain rounds
    assert policy.seed_layers(sequence(0, 10_000, 100)) == ()
    assert Adaptive(even_costs(), policy.state()).seed_layers(sequence(0, 10_000, 100)) == ()


def test_layers_are_probed_only_where_being_always_right_would_pay():
    costs = even_costs()
    limits = Candidates(costs, times_of(costs, 1), range(1, LAYERS)).limits() * costs.plain_round(1)
    plans = [round_.plan for round_ in decode(Adaptive(costs), costs, texts(0.8, 1)).rounds if round_.plan.shadow]
    assert any((plan.speedup or 1) > 1.1 * limits[-1] for plan in plans)
    for plan in plans:  # limits fall a little as the context grows
        assert all(limits[layer - 1] >= 0.9 * (plan.speedup or 1) for layer in plan.shadow.layers)


@pytest.mark.parametrize("reading", [0.0, -1.0, float("nan")])
def test_a_clock_that_stands_or_runs_backwards_changes_nothing(reading):
    costs = even_costs()
    rounds = play(Adaptive(costs), costs, 90, slower=lambda plan: reading)
    assert rounds[-1].num_drafted > 0 and math.isfinite(rounds[-1].plan.stop.least)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_plans_are_always_allowed(data):
    count, most = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([None, 1, 5]))
    policy = Adaptive(even_costs(), most=most)
    for _ in range(data.draw(st.integers(1, 30))):
        rows = [sequence(i, data.draw(st.integers(1, 30)), 40, Match()) for i in range(count)]
        plan = policy.plan(rows)
        assert plan.exit_layer in (None, *range(1, LAYERS)) and plan.num_rounds >= 1
        assert all(0 <= n <= (most or MOST) for n in plan.draft_lengths) and len(plan.draft_lengths) == count
        assert plan.stop is None or (len(plan.stop.calibration) == NUM_BINS and math.isfinite(plan.stop.least))
        assert plan.shadow is None or plan.exit_layer not in plan.shadow.layers
        for table in (plan.lookups.lengths, plan.lookups.gains) if plan.lookups else ():
            assert [len(own) for own in table] == [NUM_LOOKUP_BINS] * count
        rounds = []
        for _ in range(data.draw(st.integers(1, min(3, plan.num_rounds)))):
            exit_layer = data.draw(st.sampled_from([plan.exit_layer, LOOKUP] if plan.lookups else [plan.exit_layer]))
            outcomes = []
            for row, n in zip(rows, plan.draft_lengths, strict=True):
                drafted = data.draw(st.integers(0, n if exit_layer else 4 if exit_layer == LOOKUP else 0))
                confidences = (data.draw(st.floats(0, 1)),) * drafted if exit_layer else ()
                match = data.draw(st.integers(1, 200)) if exit_layer == LOOKUP and drafted else 0
                accepted = data.draw(st.integers(0, drafted))
                outcomes.append(row_round(row, drafted, accepted, confidences, match_length=match))
            seconds = StageSeconds(draft=1e-3, verify=data.draw(st.floats(0, 1)), head=1e-4)
            rounds.append(RoundOutput(exit_layer, outcomes, seconds, plan))
        policy.observe(plan, rounds)


def test_it_starts_with_the_prior_of_the_same_model():
    tracker = Tracker(LAYERS)
    for _ in range(50):
        tracker.add(2, [True] * 4, [0.9] * 4)
        tracker.add(1, [False] * 4, [0.9] * 4)
    row = sequence(0, 100, 2)
    plan = settled(Adaptive(even_costs(), tracker.state()), row).plan([row])
    varies = {name: getattr(plan, name) for name in ("stop", "shadow", "num_rounds", "lookups", "speedup", "ledger")}
    assert plan == Plan(2, plan.draft_lengths, keep_confidence=True, **varies)
    assert plan.speedup > 1.1 and plan.draft_lengths[0] > 4


def test_it_learns_while_decoding_that_early_passes_take_longer_than_its_table_says():
    costs = even_costs()
    dear = replace(costs, steps={rows: table.scaled(1.8) for rows, table in costs.steps.items()})
    wrong, right = (
        sum(decode(Adaptive(known), known, [text], dear).seconds for text in texts(0.8)) for known in (costs, dear)
    )
    assert wrong < 1.25 * right


@pytest.mark.parametrize("right", [True, False])
def test_a_layer_without_observations_drafts_little(right):
    costs = even_costs()
    rounds = play(Adaptive(costs, drafters=["exit"]), costs, 80, lambda plan, n: n if right else 0)
    lengths = [round_.num_drafted for round_ in rounds]
    assert 0 < next(filter(None, lengths)) <= 4
    assert lengths[-1] > 8 if right else 0 < sum(lengths) <= 64


def test_a_drafter_that_is_slower_than_its_calibrated_times_is_given_up():
    costs = even_costs()
    for dear, drafts in ((2.5, False), (1.0, True)):
        policy = Adaptive(costs, drafters=("exit",))
        rounds = play(policy, costs, 1000, lambda plan, n: n // 2, lambda plan, dear=dear: dear, most=2)
        drafting = sum(round_.exit_layer is not None for round_ in rounds[-300:])
        assert drafting > 200 if drafts else drafting < 30  # now and then it tries again


def test_state_is_plain_numbers_and_damaged_parts_are_ignored():
    costs = even_costs()
    policy = Adaptive(costs)
    decode(policy, costs, texts(0.8))
    state = json.loads(json.dumps(policy.state()))
    assert is_prior(state, LAYERS)
    for damage in ({"agreement": "none"}, {"agreement": None}, {"times": 3}):
        assert Adaptive(costs, state | damage).plan([sequence(0, 500, 50)]) is not None


def test_rounds_that_draft_are_compared_with_plain_ones_now_and_then():
    costs = replace(even_costs(), shadow_picks=Table.of({1: 1e-3, 64: 2e-2}))  # probes take long, and are rare
    rounds = play(Adaptive(costs, drafters=["exit"]), costs, 400)
    assert 0 < sum(round_.exit_layer is None for round_ in rounds[20:]) < 50


@pytest.mark.parametrize("drafters", [["lookup"], ["lookup", "exit"]])
def test_layers_that_wait_for_a_probe_do_not_hold_up_rounds_by_lookup(drafters):
    costs = even_costs()
    rounds = play(Adaptive(costs, drafters=drafters), costs, 400, lookup=Repetition(100))[100:]
    assert sum(round_.exit_layer == LOOKUP for round_ in rounds) > 250
    assert sum(round_.is_first for round_ in rounds) < 100


def test_rows_that_come_and_go_do_not_each_cost_a_decision():
    """Rows that stay keep their draft lengths; new ones draft as rows usually do, until the next decision."""
    tallies = [Tally(50, (50,) * 10, (50,) * 10)] * 99
    rows = [sequence(i, 500, 50, Match(40, tallies)) for i in range(5)]
    policy = Adaptive(even_costs(rows=(1, 4)), drafters=["lookup"])
    own = settled(policy, *rows[:4]).plan(rows[:4]).lookups.lengths
    policy._pause = 5  # as if that decision had taken long
    later = policy.plan(rows[1:])
    assert not policy._has_decided
    assert later.lookups.lengths[:3] == own[1:] and any(later.lookups.lengths[3])
    assert later.num_rounds <= policy._pause, "the next decision is not put off"
    settled(policy, rows[1]).plan(rows[1:2])
    assert policy._has_decided, "one row in place of four"


def test_exit_layers_may_be_given_in_any_order():
    costs = even_costs()
    rounds = play(Adaptive(costs, exit_layers=[3, 1, 2, 3], drafters=["exit"]), costs, 100)
    assert any(round_.plan.shadow is not None for round_ in rounds)


def test_a_decision_that_is_interrupted_is_made_again(monkeypatch):
    """Else it would go on with a lookup table of the rows before."""
    policy, later = Adaptive(even_costs()), [sequence(1, 48, 52)]
    rows = [sequence(i, 50, 50) for i in range(2)]
    settled(policy, *rows).plan(rows)
    settled(policy, *later)

    def interrupt(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Adaptive, "_set_lookups", interrupt)
        with pytest.raises(KeyboardInterrupt):
            policy.plan(later)
    before = policy.decision
    plan = policy.plan(later)
    assert policy.decision is not before and len(plan.draft_lengths) == 1
    assert plan.lookups is None or len(plan.lookups.lengths) == 1


def test_a_row_with_processors_is_noticed_whoever_left():
    policy = Adaptive(even_costs(), exit_layers=[1])
    rows = [sequence(i, 100, 40) for i in range(2)]
    settled(policy, *rows)
    decisions = []
    for second in (rows[1], rows[1], sequence(1, 100, 40, has_processors=True)):
        plan = policy.plan([rows[0], second])
        tell(policy, *(row_round(row, 0, 0) for row in (rows[0], second)), plan=replace(plan, exit_layer=None))
        decisions.append(policy.decision)
    assert decisions[1] is decisions[0] and decisions[2] is not decisions[0]


def test_a_probe_that_is_never_covered_cuts_no_program():
    costs = even_costs()
    costs = replace(costs, shadow_picks=Table.of({1: 8.52e-3, 64: 8.6e-3}))  # more than the largest balance
    policy = Adaptive(costs, drafters=["exit"])
    done = play(policy, costs, 4000, right=lambda plan, n: 0, most=3)
    assert all(one.plan.shadow is None for one in done)
    assert sum(one.is_first for one in done[-1000:]) < 50


def test_decisions_of_bursts_of_other_numbers_of_rows_stay_within_their_share():
    """One row and four by turns, where a decision takes as long as a plain round: most bursts are decoded plainly."""
    costs, rows = even_costs(rows=(1, 4)), [sequence(i, 5000, 50) for i in range(5)]
    policy, decisions, seconds = Adaptive(costs, drafters=["lookup"]), 0, 0.0
    for at in range(500):
        now = rows[:1] if at % 2 else rows[1:]
        plan = policy.plan(now)
        decisions += policy._has_decided
        taken = [StageSeconds(verify=costs.plain_round(len(now), 50)) for _ in range(8)]
        taken[0].control = 1e-3 if policy._has_decided else 0.0
        policy.observe(plan, [RoundOutput(None, [row_round(row, 0, 0) for row in now], one, plan) for one in taken])
        seconds += sum([one.total for one in taken])
    assert decisions > 1 and decisions * 1e-3 < 0.02 * seconds
