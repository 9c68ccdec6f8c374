"""What the clock tells of rounds that draft beside plain ones, and what must not be taken for that."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.replay import replay
from selfspec.control.adaptive import Adaptive
from selfspec.control.decider import COLD, MOST_MADE, NEARLY, TRY_ROUNDS, Decider
from selfspec.control.decision import HANDICAP, Decision
from selfspec.control.experience import Experience
from selfspec.control.kinds import (
    BLOCK_SHARE,
    BY_LAYERS,
    BY_LOOKUP,
    LEAST,
    MOST,
    OF_ONE_ROW,
    PLAIN,
    Kinds,
    rounds_apart,
)
from selfspec.control.laps import Seconds
from selfspec.control.looks import CALLING
from selfspec.control.pace import DECIDING_ROUNDS, FAR, HELD, KEPT_DECIDING, Pace
from selfspec.control.plan import ShadowPlan, confidence_bin
from selfspec.control.rows import RowOutcome, RowState
from selfspec.control.table import Table
from selfspec.control.timetable import DECIDING, EARLY
from tests.control.test_adaptive import LAYERS, traces
from tests.eval.replays import made_up_costs

ANY_TABLE = made_up_costs(LAYERS)


def pass_blocks(kinds, count, drafted=1.0, plain=1.0, kind=BY_LAYERS, rows=1):
    """Rounds that draft, and blocks of plain ones between them, that take so many times as long as by the table."""
    for _ in range(count):
        for which, slower in ((kind, drafted), (PLAIN, plain)):
            for _ in range(3):
                kinds.pass_rounds(1)
                kinds.look(which, rows, 1e-3, slower * 1e-3)


def test_it_finds_how_much_longer_rounds_of_each_kind_take():
    kinds = Kinds(ANY_TABLE)
    assert kinds.ratio(BY_LAYERS, 1) == kinds.ratio(BY_LOOKUP, 1) == 1
    pass_blocks(kinds, 20, drafted=1.8, plain=1.5)
    assert kinds.ratio(BY_LAYERS, 1) == pytest.approx(1.2, abs=0.01)
    pass_blocks(kinds, 20, drafted=1.2, plain=1.5, kind=BY_LOOKUP)
    assert kinds.ratio(BY_LOOKUP, 1) == pytest.approx(0.8, abs=0.01)
    assert kinds.ratio(BY_LAYERS, 1) == pytest.approx(1.2, abs=0.02)


@pytest.mark.parametrize(("known", "other"), [(BY_LAYERS, BY_LOOKUP), (BY_LOOKUP, BY_LAYERS)])
def test_a_kind_that_was_never_compared_is_held_for_as_slow_as_the_other_that_drafts(known, other):
    kinds = Kinds(ANY_TABLE)
    pass_blocks(kinds, 20, drafted=0.75, kind=known)
    assert kinds.ratio(other, 1) == kinds.ratio(known, 1) == pytest.approx(0.75, abs=0.01)
    assert not kinds.has_compared(other, 1)


def test_a_size_of_which_nothing_is_known_has_the_ratio_of_the_nearest_one():
    kinds = Kinds(ANY_TABLE)
    assert kinds.ratio(BY_LAYERS, 8) == 1 and not kinds.has_compared(BY_LAYERS, 8)
    pass_blocks(kinds, 20, drafted=0.8, rows=4)
    assert kinds.ratio(BY_LAYERS, 8) == kinds.ratio(BY_LAYERS, 4) == pytest.approx(0.8, abs=0.01)
    assert kinds.has_compared(BY_LAYERS, 8) and not kinds.has_compared(BY_LAYERS, 32)


def test_what_slows_all_rounds_alike_changes_nothing():
    kinds = Kinds(ANY_TABLE)
    for slower in (1.0, 5.0, 1.0, 0.3):
        pass_blocks(kinds, 1, slower, slower)
        kinds.pass_rounds(100)  # what was seen before it is too long ago
    assert kinds.ratio(BY_LAYERS, 1) == pytest.approx(1.0)


@given(st.integers(0, 5), st.sampled_from([50.0, 0.0, -1.0, math.nan, math.inf]))
def test_a_round_that_was_held_up_and_a_clock_that_was_set_say_nothing(at, reading):
    kinds = Kinds(ANY_TABLE)
    for i in range(12):
        kinds.pass_rounds(1)
        took = reading * 1e-3 if i % 6 == at else 1e-3
        kinds.look(PLAIN if i % 6 > 2 else BY_LAYERS, 1, 1e-3, took)
    assert kinds.ratio(BY_LAYERS, 1) == 1


def test_other_load_that_comes_between_two_looks_moves_a_ratio_a_little_at_most():
    kinds = Kinds(ANY_TABLE)
    pass_blocks(kinds, 10)
    for slower in (1.0, 4.0):
        kinds.look(PLAIN if slower > 1 else BY_LAYERS, 1, 1e-3, slower * 1e-3)
        kinds.pass_rounds(1)
    pass_blocks(kinds, 1, drafted=1.0, plain=4.0)
    assert 0.9 < kinds.ratio(BY_LAYERS, 1) <= 1


def test_ratios_stay_within_bounds_and_fade_when_nothing_confirms_them():
    kinds = Kinds(ANY_TABLE)
    pass_blocks(kinds, 50, drafted=100.0)
    assert kinds.ratio(BY_LAYERS, 1) == pytest.approx(math.exp(MOST))
    kinds.pass_rounds(20_000)
    assert kinds.ratio(BY_LAYERS, 1) == pytest.approx(1.0, abs=0.01)


def test_batches_of_another_size_start_from_what_is_known_of_the_nearest():
    kinds = Kinds(ANY_TABLE)
    pass_blocks(kinds, 20, drafted=1.3)
    assert kinds.ratio(BY_LAYERS, 8) == pytest.approx(kinds.ratio(BY_LAYERS, 1))
    pass_blocks(kinds, 20, drafted=0.9, rows=8)
    assert kinds.ratio(BY_LAYERS, 8) < 1 < kinds.ratio(BY_LAYERS, 1)


def test_what_was_learned_is_kept_for_the_same_table_alone():
    kinds = Kinds(ANY_TABLE)
    pass_blocks(kinds, 20, drafted=1.3)
    state = json.loads(json.dumps(kinds.state()))
    assert Kinds(ANY_TABLE, state).ratio(BY_LAYERS, 1) == pytest.approx(kinds.ratio(BY_LAYERS, 1))
    other = replace(ANY_TABLE, plain=ANY_TABLE.plain.scaled(2.0))
    assert Kinds(other, state).ratio(BY_LAYERS, 1) == 1


table = list(ANY_TABLE.plain.seconds)


@pytest.mark.parametrize(
    "prior",
    [None, 3, {}, {"table": table}, {"table": table, "ratios": {"1": [[0.5, 1, 0]]}, "last_plain": 0}]
    + [{"table": table, "ratios": {"1": [[bad, 1, 0]] * 2}, "last_plain": 0} for bad in ("x", math.nan)],
)
def test_a_prior_that_is_something_else_is_passed_over(prior):
    assert Kinds(ANY_TABLE, prior).ratio(BY_LAYERS, 1) == 1


def test_blocks_take_no_more_than_their_share():
    for speedup in (1.05, 1.5, 3.0):
        apart = rounds_apart(speedup, plain_rounds=3.0)
        lost = OF_ONE_ROW.rounds * (1 - 1 / speedup)
        assert lost <= 1.001 * BLOCK_SHARE * 3.0 * apart
    assert rounds_apart(0.9, 3.0) == 0


# ------------------------------------------------------------------------------------------------------------ adaptive


def colder(costs, slower):
    """The machine as it is where rounds that draft take so many times as long as its table says."""
    many = {name: {r: t.scaled(slower) for r, t in getattr(costs, name).items()} for name in ("early", "late")}
    few = Table.of({1: 0.0, 64: 0.0})
    return replace(costs, **many, rest=few)


def seconds_of(acceptance, told, real):
    run = replay(traces(acceptance, count=8, tokens=512), Adaptive(told, drafts=("exit",)), real)
    return run.seconds, run.plain_seconds


def test_it_drafts_no_more_where_the_clock_says_that_plain_rounds_are_faster():
    costs = made_up_costs(LAYERS)
    believed, plain = seconds_of(0.4, costs, costs)
    assert believed < 0.9 * plain  # by the table drafts pay
    took, plain = seconds_of(0.4, costs, colder(costs, 1.6))
    assert took < 1.03 * plain


@pytest.mark.parametrize("acceptance", [0.7, 0.85])
def test_plain_rounds_in_between_cost_little_where_the_table_is_right(acceptance):
    costs = made_up_costs(LAYERS)
    run = replay(traces(acceptance, count=8, tokens=512), Adaptive(costs, drafts=("exit",)), costs)
    plain = sum(round_.seconds for round_ in run.rounds if round_.plan.exit_layer is None)
    # Their tokens would have come by drafts, in so much less.
    assert plain and plain * (1 - run.seconds / run.plain_seconds) < 0.005 * run.seconds


def test_blocks_of_plain_rounds_are_few_and_drafts_go_on_after_them():
    costs = made_up_costs(LAYERS)
    rounds = replay(traces(0.5, count=8, tokens=512), Adaptive(costs, drafts=("exit",)), costs).rounds
    exits = [round_.plan.exit_layer for round_ in rounds]
    assert 4 <= exits.count(None) <= 0.05 * len(exits)
    assert any(exits[at : at + 4] == [None] * 4 and exits[at + 4] for at in range(len(exits) - 4))


def test_what_the_clock_told_is_where_a_later_policy_starts():
    costs = made_up_costs(LAYERS)
    policy = Adaptive(costs, drafts=("exit",))
    replay(traces(0.5, count=4, tokens=512), policy, colder(costs, 1.6))
    ratios = policy.state()["pace"]["ratios"]
    assert ratios["1"][0][0] > 0.1
    again = Adaptive(costs, json.loads(json.dumps(policy.state())), drafts=("exit",))
    assert again.state()["pace"]["ratios"] == ratios


@given(st.dictionaries(st.sampled_from([1, 2, 5, 32]), st.floats(1e-6, 1e-3), max_size=3))
def test_what_deciding_takes_is_known_from_the_first_round_on(taken):
    pace, at = Pace(ANY_TABLE), dict.fromkeys(("draft", "verify", "head", "pick", "rest"), 1e-3)
    assert pace.deciding_of(3) == 0
    for num_rows, seconds in taken.items():
        for _ in range(60):
            for _ in range(DECIDING_ROUNDS):
                pace.pass_round(seconds, around=1e-3, num_rows=num_rows)
            pace.look(1, num_rows, at, Seconds(**at), False)
    state = json.loads(json.dumps(pace.state()))
    again = Pace(ANY_TABLE, state)
    assert again.deciding == {size: KEPT_DECIDING * known for size, known in pace.deciding.items()}
    for num_rows, seconds in taken.items():
        assert pace.deciding_of(num_rows) == pytest.approx(min(seconds, ANY_TABLE.plain_round(num_rows)), rel=0.01)
    if taken:  # what fewer rows took is known of more, never the other way round
        assert pace.deciding_of(1000) == pace.deciding_of(max(taken)) > 0
        assert min(taken) == 1 or pace.deciding_of(1) == 0
    for other in ({}, {"1": -1.0}, {"1": math.inf}, {"x": 1.0}, [1.0], None):
        assert Pace(ANY_TABLE, {**state, "deciding": other}).deciding == {}
    assert Pace(made_up_costs(LAYERS, head=3.0), {**state, "table": [1.0]}).deciding == {}


def test_a_decision_among_few_rounds_of_a_batch_is_spread_over_those_that_it_is_for():
    at = dict.fromkeys(("draft", "verify", "head", "pick", "rest"), 1e-3)
    for num_rows in (1, 8):
        pace, spread_over = Pace(ANY_TABLE), Pace(ANY_TABLE)
        for _ in range(7):
            pace.pass_round(4e-5, around=1e-3, num_rows=num_rows)
        pace.pass_round(1e-3, around=1e-3, num_rows=num_rows)
        pace.look(1, num_rows, at, Seconds(**at), False)
        mean = (7 * 4e-5 + 1e-3) / 8
        beyond = 1e-3 - FAR * 4e-5
        wanted = mean - (beyond / 8 - beyond / HELD if num_rows > 1 else 0)
        assert pace.deciding_of(num_rows) == pytest.approx(wanted)
        for seconds in [4e-5] * (HELD - 1) + [1e-3]:  # as many rounds as one is for: their mean
            spread_over.pass_round(seconds, around=1e-3, num_rows=num_rows)
        spread_over.look(1, num_rows, at, Seconds(**at), False)
        assert spread_over.deciding_of(num_rows) == pytest.approx((4e-5 * (HELD - 1) + 1e-3) / HELD)


def test_a_decision_is_told_from_another_round_beside_it():
    pace, at = Pace(ANY_TABLE), dict.fromkeys(("draft", "verify", "head", "pick", "rest"), 1e-3)
    pace.pass_round(1e-3, around=1e-3, num_rows=8)
    pace.look(1, 8, at, Seconds(**at), False)
    assert pace.deciding_of(8) == 0, "of a single round nobody knows"
    pace.pass_round(4e-5, around=1e-3, num_rows=8)
    pace.look(1, 8, at, Seconds(**at), False)
    assert pace.deciding_of(8) == pytest.approx((1 + FAR) * 4e-5 / 2 + (1e-3 - FAR * 4e-5) / HELD)


def test_what_rounds_of_other_batches_and_plain_ones_took_is_not_held_against_a_single_row():
    pace, at = Pace(ANY_TABLE), dict.fromkeys(("draft", "verify", "head", "pick", "rest"), 1e-3)
    for _ in range(40):
        pace.pass_round(1e-3, around=5e-3, num_rows=8)
    for _ in range(40):
        pace.pass_round(1e-3)
    pace.pass_round(1e-5, around=1e-3)
    pace.look(1, 1, at, Seconds(**at), False)
    assert pace.deciding == {1: pytest.approx(1e-5)} and pace.around == {1: 0.0}


@pytest.mark.parametrize("count", [4, 33])
def test_calls_of_few_rounds_tell_of_deciding_too(count):
    at, state, taken = dict.fromkeys(("draft", "verify", "head", "pick", "rest"), 1e-3), None, 5e-5
    for _ in range(40):
        pace = Pace(ANY_TABLE, state)
        for _ in range(count):
            pace.pass_round(taken, around=1e-3)
        pace.look(1, 1, at, Seconds(**at), False)
        state = pace.state()
    assert (0.2 if count == 4 else 0.7) * taken < pace.deciding_of(1) <= taken


def test_what_is_spent_around_rounds_that_draft_is_learned_beyond_what_plain_ones_spend():
    pace, at = Pace(ANY_TABLE), dict.fromkeys(("draft", "verify", "head", "pick", "rest"), 1e-3)
    known = []
    for spent in (1.25e-3, 0.5e-3, 60e-3):  # the last: the caller's own code, which plain rounds' tokens run as well
        for _ in range(60):
            for each in (0.0, 2 * spent) * (DECIDING_ROUNDS // 2):  # those that begin a call take longer
                pace.pass_round(1e-4, around=each)
            pace.look(1, 1, at, Seconds(**at), False)
        known.append(pace.around_of(3))
    assert known == pytest.approx([0.25e-3, 0.0, min(3e-3, ANY_TABLE.plain_round(1))], abs=1e-6)
    again = Pace(ANY_TABLE, json.loads(json.dumps(pace.state() | {"around": {"1": 2e-4}})))
    assert again.around_of(1) == KEPT_DECIDING * 2e-4


def test_what_is_spent_around_forwards_sets_no_kinds_apart():
    pace, at = Pace(ANY_TABLE), dict.fromkeys(("draft", "verify", "head", "pick", "rest"), 1e-3)
    for exit_layer, rest in [(None, 1e-3), (1, 9e-3)] * 8:
        pace.pass_round(1e-4)
        pace.look(exit_layer, 1, at, Seconds(**(at | {"rest": rest})), False)
    assert pace.kinds.has_compared(BY_LAYERS, 1) and pace.kinds.ratio(BY_LAYERS, 1) == pytest.approx(1.0)


def test_drafts_that_take_the_interpreter_longer_than_they_save_are_given_up():
    costs = replace(made_up_costs(LAYERS), rest=Table.of({1: 4e-3, 64: 4e-3}))
    drafting = [drafting_rounds(Adaptive(costs, drafts=("exit",)), spent) for spent in (0.0, 11e-3)]
    assert drafting[0] > 80 and drafting[1] < drafting[0] / 2, drafting


def drafting_rounds(policy, spent):
    """How many of 200 rounds draft, of which every second token is right, where those take so long around it."""
    row, rounds = RowState(0, 60, 4000), 0
    for at in range(200):
        plan = policy.plan([row])
        most, drafted, chance = plan.draft_lengths[0] if plan.exit_layer else 0, 0, 1.0
        while drafted < most and (not drafted or chance >= plan.stop.least):
            drafted, chance = drafted + 1, chance * plan.stop.calibration[confidence_bin(0.75)]
        rounds += drafted > 0
        taken = policy.costs.stages(plan.exit_layer, [drafted])
        seconds = Seconds(**(taken | {"rest": taken["rest"] + (spent if drafted else 0.0)}), control=1e-6)
        right = min(drafted, (0, 1, 0, 2, 0, 1, 0, 3)[at % 8])
        policy.observe(plan, [RowOutcome(0, drafted, right, (0.75,) * drafted)], seconds)
    return rounds


def in_batch(acceptance, told, real, rows=4):
    """(how many times as fast as plain decoding, share of the rounds that draft), of several rows at a time."""
    texts = [trace.cut(256 - i) for i, trace in enumerate(traces(acceptance, count=8, tokens=256))]  # that end apart
    run = replay(texts, Adaptive(told, drafts=("exit",)), real, rows)
    drafting = [round_.plan.exit_layer is not None for round_ in run.rounds]
    return run.plain_seconds / run.seconds, sum(drafting) / len(drafting)


def test_a_batch_tries_drafts_that_the_table_thinks_too_little_of():
    costs = made_up_costs(LAYERS)
    for slower in (1.35, 1.5):
        speedup, drafting = in_batch(0.5, colder(costs, slower), colder(costs, 1.0))
        assert speedup > 1.2 and drafting > 0.5


def test_it_tries_them_once_and_at_little_cost_where_the_table_is_right(monkeypatch):
    costs = colder(made_up_costs(LAYERS), 1.5)
    speedup, drafting = in_batch(0.35, costs, costs)
    assert speedup > 0.99 and 0 < drafting < 0.04
    tried, decide = [], Decider.decide
    monkeypatch.setattr(Decider, "decide", lambda *given: tried.append(decide(*given)) or tried[-1])
    assert in_batch(0.3, costs, costs, rows=1)[1] < 0.01
    assert tried and not any(tried), "a single row's table is taken at its word"
    in_batch(0.35, costs, costs)
    assert any(tried)


def earlier(acceptance, costs, rows=4):
    """What is kept of a policy that has seen such texts, and has tried drafts."""
    policy = Adaptive(costs, drafts=("exit",))
    replay(traces(acceptance, count=8, tokens=256), policy, costs, rows)
    state = json.loads(json.dumps(policy.state()))
    assert policy._experience.pace.kinds.has_compared(BY_LAYERS, rows)
    return state


@pytest.mark.parametrize("acceptance", [0.3, 0.9])
def test_a_batch_tries_drafts_in_the_place_of_looks_where_earlier_texts_promised_nearly_enough(acceptance):
    costs = colder(made_up_costs(LAYERS), 1.3)
    policy = Adaptive(costs, earlier(0.45, costs), drafts=("exit",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy._decider, "_is_worth_a_try", lambda left: False)  # which needs no look
        run = replay(traces(acceptance, count=8, tokens=256), policy, costs, 4)
    drafting = [round_.plan.exit_layer is not None for round_ in run.rounds]
    first = drafting.index(True)
    tried = [round_.plan for round_ in run.rounds[first : first + TRY_ROUNDS]]
    assert all(plan.exit_layer and NEARLY <= plan.speedup < HANDICAP and plan.shadow is None for plan in tried)
    speedup, share = run.plain_seconds / run.seconds, sum(drafting) / len(drafting)
    assert (speedup > 1.5 and share > 0.4) if acceptance == 0.9 else (speedup > 0.99 and share < 0.2)


@pytest.mark.parametrize(("speedup", "rows", "tries"), [(0.96, 4, True), (NEARLY - 0.01, 4, False), (0.96, 1, False)])
def test_looks_pay_for_what_is_tried_in_their_place(speedup, rows, tries):
    policy = Adaptive(made_up_costs(LAYERS), drafts=("exit",))
    policy.plan([RowState(i, 60, 4000 - i) for i in range(rows)])
    decider, looks = policy._decider, policy._looks
    decider.decision = Decision(rows / decider.worth.plain_seconds, speedup)
    with pytest.MonkeyPatch.context() as patch:
        drafts = Decision(1.0, speedup, 2, rate=1.0)
        patch.setattr("selfspec.control.decider.decide", lambda *given: drafts if given[-1] == NEARLY else 1 / 0)
        before, looks.are_awaited = looks._credit, False
        assert policy._deciding.try_again() == tries
    lost = TRY_ROUNDS * decider.worth.plain_seconds * (1 / speedup - 1)
    assert before - looks._credit == pytest.approx((lost + CALLING + DECIDING) * tries)
    assert policy._trials.trying == TRY_ROUNDS * tries


def test_a_try_is_held_against_what_was_forecast_of_the_rows_that_it_was_priced_for():
    """Some of them may have left since, without another decision."""
    policy, expected = Adaptive(made_up_costs(LAYERS), drafts=("exit",)), []
    policy.plan([RowState(i, 60, 4000) for i in range(5)])
    decider = policy._decider
    with pytest.MonkeyPatch.context() as patch:
        drafts = Decision(1.0, 0.96, 2, rate=10.0)
        patch.setattr("selfspec.control.decider.decide", lambda *given: drafts)
        patch.setattr(policy._experience, "expect", lambda rate, *given: expected.append(rate))
        decider.decision = Decision(5 / decider.worth.plain_seconds, 0.96)
        policy._looks._credit, policy._looks._due, policy._looks.are_awaited = 1.0, 0, False
        plan = policy.plan([RowState(i, 60, 4000) for i in range(4)])
    assert plan.exit_layer == 2 and expected == [2.0]


def test_plans_are_of_what_was_decided_last():
    costs = made_up_costs(LAYERS)
    decider = Decider(costs, Experience(costs, None, False), range(1, LAYERS))
    decider.price([RowState(0, 60, 4000)])
    plans = []
    for exit_layer in (2, 3, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("selfspec.control.decider.decide", lambda *given, at=exit_layer: Decision(1.0, 2.0, at))
            decider.decide(False, 1.0)
        plans.append(decider.plan((3,), None))
        assert decider.plan((3,), None) is plans[-1]
        assert [decider.plan((n,), None).draft_lengths for n in (4, 3)] == [(4,), (3,)]
    assert [plan.exit_layer for plan in plans] == [2, 3, None]


def test_the_first_rounds_of_a_try_are_not_looked_at():
    """They find caches as plain rounds left them, and take longer than those after them."""
    costs = colder(made_up_costs(LAYERS), 1.3)
    policy = Adaptive(costs, earlier(0.45, costs), drafts=("exit",))
    experience, looked = policy._experience, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy._decider, "_is_worth_a_try", lambda left: not policy._decider._tried)
        patch.setattr(
            experience, "add", lambda plan, outcomes, seconds, told: looked.append((policy._trials.trying, told))
        )
        rows = [RowState(i, 60, 4000) for i in range(6)]
        for _ in range(30):
            plan = policy.plan(rows)
            if looked and not policy._trials.trying:
                break
            lengths = [n if plan.exit_layer else 0 for n in plan.draft_lengths]
            trying = policy._trials.trying > 0 and plan.exit_layer is not None
            policy.observe(plan, [RowOutcome(i, n, 0, (0.5,) * n) for i, n in enumerate(lengths)], Seconds())
            looked = looked if trying else []
    assert [told is not None for _, told in looked] == [False] * COLD + [True] * (TRY_ROUNDS - COLD)


def test_what_early_passes_take_beside_the_table_is_where_a_later_text_begins():
    pace, at = Pace(ANY_TABLE), dict.fromkeys(("draft", "verify", "head", "pick", "rest"), 1e-3)
    for _ in range(60):
        pace.look(1, 1, at, Seconds(**{**at, "draft": 0.6e-3}), True)
        pace.look(1, 1, at, Seconds(**{**at, "draft": 1.2e-3}), False)
    state = json.loads(json.dumps(pace.state()))
    assert Pace(ANY_TABLE, state).passes == pytest.approx([1.2, 0.6], rel=0.01)
    for other in ([1.0], [1.0, 0.1], [3.0, 1.0], [1.0, math.nan], ["x", 1.0], None, 2.0):
        assert Pace(ANY_TABLE, {**state, "passes": other}).passes == [1.0, 1.0]
    assert Pace(made_up_costs(LAYERS, head=3.0), {**state, "table": [1.0]}).passes == [1.0, 1.0]


@pytest.mark.parametrize("sizes", [[9, 12, 15, *[15] * 40], [9, 9, 9, 13, 13, 13] * 8], ids=["once", "all the time"])
def test_a_try_that_rows_interrupt_by_joining_is_made_after_all(sizes):
    """Prompts are read a few at a time: a batch grows past the size that its first try was meant for."""
    policy = Adaptive(colder(made_up_costs(LAYERS), 1.3), earlier(0.45, colder(made_up_costs(LAYERS), 1.3)))
    decider = policy._decider
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decider, "_is_worth_a_try", lambda left: decider.num_rows.bit_length() not in decider._tried)
        tried = []
        for size in sizes:  # of one bit length
            rows = [RowState(i, 60, 4000 - i) for i in range(size)]
            plan = policy.plan(rows)
            lengths = [n if plan.exit_layer else 0 for n in plan.draft_lengths]
            tried.append(plan.exit_layer is not None and policy._trials.trying > 0)
            outcomes = [RowOutcome(i, n, n * (i % 2), (0.5,) * n) for i, n in enumerate(lengths)]
            policy.observe(plan, outcomes, Seconds())
    assert COLD + LEAST <= sum(tried) <= TRY_ROUNDS + 1


@pytest.mark.parametrize("period", [1, 2, 3, 4, 6])
def test_rows_that_come_and_go_all_the_time_do_not_keep_a_losing_try_going(period):
    costs, rng = colder(made_up_costs(LAYERS, rows=(1, 4, 16)), 1.5), np.random.default_rng(0)
    policy, drafting = Adaptive(costs, drafts=("exit",)), 0
    for at in range(400):
        rows = [RowState(i, 60 + at, 20000) for i in range((4, 6)[at // period % 2])]
        plan = policy.plan(rows)
        lengths = [min(n, 3) if plan.exit_layer else 0 for n in plan.draft_lengths]
        drafting += plan.exit_layer is not None
        outcomes = [RowOutcome(i, n, int(n and rng.random() < 0.35), (0.5,) * n) for i, n in enumerate(lengths)]
        policy.observe(plan, outcomes, Seconds(**costs.stages(plan.exit_layer, lengths)))
    assert 0 < drafting <= 4 * TRY_ROUNDS


@pytest.mark.parametrize(("skipped", "share"), [(0, 0.7), (2 * EARLY, 1.0)])
def test_a_batch_looks_at_the_clock_half_as_often_as_the_first_rounds_of_one_row(skipped, share, monkeypatch):
    def looks(num_rows):
        policy, looked = Adaptive(made_up_costs(LAYERS), drafts=("exit",)), []
        monkeypatch.setattr(policy._experience, "add", lambda *told: looked.append(told[-1] is not None))
        for _ in range(skipped + EARLY):
            policy._trials.trying = 0
            plan = policy.plan([RowState(i, 60, 4000) for i in range(num_rows)])
            told = [RowOutcome(i, n, n, (0.9,) * n) for i, n in enumerate(plan.draft_lengths)]
            policy.observe(plan, told, Seconds())
        return sum(looked[skipped:])

    assert 0 < looks(8) <= share * looks(1)
    assert skipped == 0 or looks(8) == looks(1)


@pytest.mark.parametrize(
    ("in_step", "tokens", "times"), [(0, 100, 1), (1, 100, 1), (3, 100, 1 / 0.7), (3, 1000, 1 / 0.97), (3, 50, 1.5)]
)
def test_drafts_must_make_up_for_rows_that_would_have_ended_together(in_step, tokens, times, monkeypatch):
    """Each that ends by itself takes as long as ten plain rounds."""
    decider = Decider(made_up_costs(LAYERS), Experience(made_up_costs(LAYERS), None, False), range(1, LAYERS))
    decider.price([RowState(i, 60, 4000) for i in range(4)])
    plain, asked = decider.worth.plain_seconds, []
    monkeypatch.setattr("selfspec.control.decider.PARTING", 9.5 * plain)
    monkeypatch.setattr("selfspec.control.decider.decide", lambda *given: asked.append(given[-1]) or Decision())
    decider.decide(False, tokens * plain, in_step)
    assert asked[0] == pytest.approx(HANDICAP * times)


def test_plans_are_made_once_for_each_length_until_something_is_decided():
    costs = made_up_costs(LAYERS)
    decider = Decider(costs, Experience(costs, None, False), range(1, LAYERS))
    decider.price([RowState(0, 60, 4000)])
    decider._hold(Decision(exit_layer=2))
    asked = [(9,), (4,)]
    made = [decider.plan(lengths, None) for lengths in asked]
    assert [plan.draft_lengths for plan in made] == asked
    assert all(decider.plan(lengths, None) is plan for lengths, plan in zip(asked, made, strict=True))
    for length in range(10, 10 + 2 * MOST_MADE):
        decider.plan((length,), None)
        assert len(decider._made) <= MOST_MADE
    shadow = ShadowPlan((3,), (0,), 1)
    assert decider.plan((9,), shadow).shadow is shadow and decider.plan((9,), None).shadow is None
    decider._hold(Decision(exit_layer=3))
    assert decider.plan((9,), None).exit_layer == 3


@pytest.mark.parametrize("rooms", [(40, 40, 40, 40), (40, 39, 38, 37), (40, 40, 31, 31), (40,)])
def test_rows_are_in_step_as_far_as_they_have_room_for_as_many_tokens(rooms, monkeypatch):
    policy, told = Adaptive(made_up_costs(LAYERS), drafts=("exit",)), []
    policy._looks.begin = lambda *given: None
    monkeypatch.setattr(Decider, "decide", lambda self, whole, left, in_step: told.append(in_step) or False)
    policy.plan([RowState(i, 60, room) for i, room in enumerate(rooms)])
    assert told == [len(rooms) - len({*rooms})]


@pytest.mark.parametrize(("tokens", "tries"), [(20, False), (4000, True)])
def test_a_batch_that_is_soon_done_tries_nothing(tokens, tries):
    costs = colder(made_up_costs(LAYERS), 1.3)
    policy = Adaptive(costs, earlier(0.45, costs), drafts=("exit",))
    policy.plan([RowState(i, 60, tokens) for i in range(4)])
    decider = policy._decider
    decider.decision, decider._tried = Decision(4 / decider.worth.plain_seconds, NEARLY + 0.01), set()
    left = tokens * decider.worth.plain_seconds
    assert decider._is_worth_a_try(left) == tries
