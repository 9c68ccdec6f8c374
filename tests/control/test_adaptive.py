"""The default policy, driven through replay: when it drafts, when it stops, what it spends on looking."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.replay import replay
from selfspec.control import decider, deciding
from selfspec.control.adaptive import Adaptive
from selfspec.control.choosing import STAY, choose, favour_of
from selfspec.control.decision import UNKNOWN, decide
from selfspec.control.laps import Seconds
from selfspec.control.parts import WHOLE
from selfspec.control.pieces import MOST
from selfspec.control.plan import DRAFTS, NUM_BINS, Plan, SurvivalStop
from selfspec.control.rows import RowOutcome, RowState, Shadow
from selfspec.control.table import Table
from selfspec.control.timetable import FIRST_REPLAN
from selfspec.control.tracker import Tracker
from selfspec.control.worth import CAPS, Worth
from tests.eval.replays import made_up_costs, trace_of, with_dear_contexts

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


def test_texts_in_which_nobody_looked_at_layers_tell_a_later_one_nothing_of_them():
    """A model so fast that a look would be a good part of a text: the next ones are decoded as the first, and none
    drafts by what nobody knows."""
    costs = made_up_costs(LAYERS)
    fast = {name: getattr(costs, name).scaled(0.005) for name in ("plain", "head", "pick", "rest")}
    fast |= {name: {r: t.scaled(0.005) for r, t in getattr(costs, name).items()} for name in ("early", "late")}
    costs, state, texts = replace(costs, context=0.0, **fast), None, traces(0.1, tokens=40)
    for trace in texts[:3]:
        policy = Adaptive(costs, prior=state)
        run = replay([trace], policy, costs)
        assert {round_.plan.exit_layer for round_ in run.rounds} == {None}
        before, state = state, policy.state()
        assert state["waited"] > (0.0 if before is None else before["waited"])
    assert not Adaptive(costs, prior=state)._experience.has_seen(range(1, LAYERS))
    known = Adaptive(costs, prior=seen(replace(made_up_costs(LAYERS))))
    assert known._experience.has_seen(range(1, LAYERS))


def seen(costs):
    """What a policy has seen of a text in which it looked."""
    policy = Adaptive(costs)
    replay(traces(0.6), policy, costs)
    return policy.state()


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


def test_a_few_rows_that_leave_need_no_decision_of_their_own(monkeypatch):
    decided = []
    monkeypatch.setattr(decider, "decide", lambda *given: decided.append(given) or decide(*given))
    costs = made_up_costs(LAYERS, rows=(1, 4, 16))
    policy = Adaptive(costs)
    counts = []
    for num_rows in (8, 7, 6, 7, 5, 1, 2):
        plan = policy.plan([RowState(i, 40, 100) for i in range(num_rows)])
        assert len(plan.draft_lengths) == num_rows
        counts.append(len(decided))
    assert [now > before for before, now in itertools.pairwise(counts)] == [False] * 3 + [True] * 3
    for num_rows, again in ((32, True), (24, False), (17, False), (15, True)):
        before = len(decided)
        policy.plan([RowState(i, 40, 100) for i in range(num_rows)])
        assert (len(decided) > before) == again


def test_rows_that_come_after_others_have_ended_are_decided_upon(monkeypatch):
    """Few rows that are nearly done keep what was decided; a next batch, of as many as before, does not."""
    decided = []
    monkeypatch.setattr(decider, "decide", lambda *given: decided.append(given) or decide(*given))
    costs = made_up_costs(LAYERS, rows=(1, 4, 16))
    monkeypatch.setattr(deciding, "SOON_DONE", 9 * costs.plain_round(8))
    policy, counts = Adaptive(costs), []
    for num_rows, room in ((8, 9), (4, 5), (1, 2), (8, 5000)):
        policy.plan([RowState(i, 40, room) for i in range(num_rows)])
        counts.append(len(decided))
    assert [now > before for before, now in itertools.pairwise(counts)] == [False, False, True]


@pytest.mark.parametrize("num_rows", [1, 16])
def test_a_batch_changes_its_layer_for_less(num_rows, monkeypatch):
    stays = []

    def chosen(parts, layers, worth, right, share, now, stay, *more):
        stays.append(stay)
        return choose(parts, layers, worth, right, share, now, stay, *more)

    monkeypatch.setattr("selfspec.control.choosing.choose", chosen)
    policy = Adaptive(made_up_costs(LAYERS, rows=(1, 16)))
    policy.plan([RowState(i, 40, 100) for i in range(num_rows)])
    assert {*stays} == {1 + STAY / num_rows}


def test_rows_that_are_nearly_done_need_no_decision_of_their_own(monkeypatch):
    decided = []
    monkeypatch.setattr(decider, "decide", lambda *given: decided.append(given) or decide(*given))
    costs = made_up_costs(LAYERS, rows=(1, 4, 16))
    monkeypatch.setattr(deciding, "SOON_DONE", 3 * costs.plain_round(8))
    for tokens, again in ((1000, True), (2, False)):
        policy = Adaptive(costs)
        policy.plan([RowState(i, 40, 1000) for i in range(8)])
        before = len(decided)
        policy.plan([RowState(0, 40, tokens)])
        assert (len(decided) > before) == again


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


def first_look(seconds, room):
    """Decisions and drafts before the first look at layers that are never right, and the round of that; a layer takes
    so many seconds."""
    costs = made_up_costs(LAYERS)
    for name in ("plain", "rest", "head", "pick", "short"):
        costs = replace(costs, **{name: getattr(costs, name).scaled(seconds / 1e-3)})
    for name in ("early", "late"):
        costs = replace(costs, **{name: {r: t.scaled(seconds / 1e-3) for r, t in getattr(costs, name).items()}})
    policy = Adaptive(costs)
    policy.seed_layers = lambda row: ()
    rounds = replay(traces(0.0, count=1, tokens=room), policy, costs).rounds
    at = next((i for i, round_ in enumerate(rounds) if round_.plan.shadow), len(rounds))
    return sum(round_.plan.exit_layer is not None for round_ in rounds[:at]), at


def test_what_would_take_more_than_it_can_gain_is_not_found_out_until_it_is_earned():
    drafts, at = first_look(1e-3, 200)
    assert drafts and at < 20, "a large model finds out at once"
    short, long = 200, 4000
    assert first_look(1e-5, short) == (0, short), "of a small one a short text is plain"
    drafts, at = first_look(1e-5, long)
    assert drafts and at < 20, "and of a long one it is little"


def test_layers_that_a_batch_does_not_look_at_are_looked_at_for_the_row_that_comes_after(monkeypatch):
    """Where a first look was awaited, and its turn came while no layer could have paid."""
    pays = [False]
    could_pay = decider.Decider.could_pay
    monkeypatch.setattr(decider.Decider, "could_pay", lambda *given: could_pay(*given) if pays[0] else [])
    costs = made_up_costs(LAYERS)
    policy = Adaptive(replace(costs, short=Table.of({1: 1.0, 64: 1.0})), drafts=["exit"])
    policy.seed_layers = lambda row: ()

    def look(rows):
        at = 100
        for _ in range(40_000):
            at += 1
            plan = policy.plan([RowState(i, at, 50) for i in range(rows)])
            if plan.shadow is not None:
                return True
            policy.observe(plan, [RowOutcome(i, 0, 0) for i in range(rows)], Seconds(**costs.stages(None, [0] * rows)))
            policy.pass_plain(ahead := policy.plain_ahead, ahead * costs.plain(rows))
        return False

    assert not look(4)
    pays[0] = True
    assert look(1)


def test_layers_are_looked_at_only_where_being_always_right_would_pay():
    costs = made_up_costs(LAYERS)
    limits = Worth(costs, 1).limits() * costs.plain_round(1)
    rounds = [round_ for round_ in replay(traces(0.8, count=1), Adaptive(costs), costs).rounds if round_.plan.shadow]
    assert any(round_.plan.speedup > 1.1 * limits[-1] for round_ in rounds)
    for round_ in rounds:  # limits fall a little as the context grows
        assert all(limits[layer - 1] >= 0.9 * round_.plan.speedup for layer in round_.plan.shadow.layers)


def test_nothing_is_looked_at_and_every_round_is_the_same_where_no_layer_could_pay():
    costs = made_up_costs(2, head=0.1)
    policy = Adaptive(costs)
    assert policy.seed_layers(RowState(0, 100, 10_000)) == ()
    rounds = replay(traces(1, count=1, layers=2), policy, costs).rounds
    assert {id(round_.plan) for round_ in rounds if round_.plan.exit_layer is None} == {id(rounds[0].plan)}


def test_only_layers_to_choose_from_are_looked_at_in_prompts():
    policy = Adaptive(made_up_costs(LAYERS), exit_layers=[2, 3])
    assert policy.seed_layers(RowState(0, 100, 10_000)) == (2, 3)


def test_of_layers_that_promise_as_much_the_one_near_a_quarter_of_the_depth_is_left_at():
    costs = made_up_costs(LAYERS)
    worth = Worth(costs, 1)
    right, share = np.full((LAYERS - 1, NUM_BINS), 0.7), np.full((LAYERS - 1, NUM_BINS), 1 / NUM_BINS)
    promised = worth.rates(right, share)[0][0].max(1)
    even, favour = promised.max() / promised, 1 + favour_of(LAYERS)
    for beside, expected in ((even, {0, 1, 2, 3, 4, 5, 6}), (even * favour, {1})):
        chosen = choose([WHOLE], range(1, LAYERS), worth, right, share, (WHOLE, None), 1.0, beside)
        assert chosen.exit_layer - 1 in expected
    near = choose([WHOLE], range(1, LAYERS), worth, right, share, (WHOLE, None), 1.0, even * favour)
    assert near.rate == promised[1]  # what it promises stays what it is


@settings(max_examples=25, deadline=None)
@given(st.integers(1, LAYERS - 1), st.sampled_from([1, 4]), st.integers(1, 900))
def test_the_limit_of_a_layer_is_what_it_promises_if_it_is_always_right(layer, rows, context):
    costs = with_dear_contexts(made_up_costs(LAYERS))
    worth = Worth(costs, rows, context)
    limit = max(rows * (1 + n) / costs.round(layer, [n] * rows, context) for n in range(1, MOST + 1))
    assert worth.limits()[layer - 1] == pytest.approx(limit)
    right = np.ones((LAYERS - 1, NUM_BINS))
    assert worth.rates(right, right / NUM_BINS)[0][0, layer - 1].max() <= 1.001 * limit


@pytest.mark.parametrize("reading", [0.0, -1.0, float("nan")])
def test_a_clock_that_stands_or_runs_backwards_changes_nothing(reading):
    costs, policy = made_up_costs(LAYERS), Adaptive(made_up_costs(LAYERS))
    for _ in range(100):
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


def test_rows_draft_on_together_while_their_mean_survival_pays():
    stop = SurvivalStop((0.5,) * NUM_BINS, least=0.4)
    assert stop.goes_on([0.9, 0.1]) and stop.goes_on([0.4])
    assert not stop.goes_on([0.9, 0.1, 0.1]) and not stop.goes_on([0.39])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, NUM_BINS - 1), st.integers(1, LAYERS - 1), st.sampled_from([*CAPS]))
def test_the_worth_of_a_way_to_stop_is_what_adding_up_all_drafts_gives(seed, bin_, exit_layer, cap):
    rng = np.random.default_rng(seed)
    right, share = np.sort(rng.random((LAYERS - 1, NUM_BINS)), 1), rng.random((LAYERS - 1, NUM_BINS))
    share /= share.sum(1, keepdims=True)
    costs, line = made_up_costs(LAYERS), exit_layer - 1
    [rates], drafted = Worth(costs, 1).rates(right, share)
    on, also_right = share[line, bin_:].sum(), (share * right)[line, bin_:].sum()
    chance, expected, kept = 1.0, 0.0, 0.0
    for length in range(1, cap + 1):  # the chance that a draft has this many tokens, and that so many are right
        chance_here = chance * (1 - on if length < cap else 1.0)
        expected += length * chance_here
        kept += also_right ** (length - 1) * (share * right)[line].sum()
        chance *= on
    way = bin_ * len(CAPS) + CAPS.index(cap)
    assert drafted[line, way] == pytest.approx(expected, rel=1e-4)
    low, part = int(expected), expected - int(expected)
    fixed = [costs.round(exit_layer, [n]) for n in (low, min(low + 1, MOST))] if low else None
    if fixed is not None:
        assert (1 + kept) / rates[line, way] == pytest.approx(fixed[0] + part * (fixed[1] - fixed[0]), rel=1e-3)


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


@given(st.integers(1, LAYERS - 1), st.integers(0, MOST), st.sampled_from([1, 4]), st.integers(1, 900))
def test_worth_and_costs_agree_on_what_a_round_takes_its_dear_first_pass_included(exit_layer, drafted, rows, context):
    costs = with_dear_contexts(made_up_costs(LAYERS))
    costs = replace(costs, first={rows: table.scaled(1.5) for rows, table in costs.early.items()})
    costs = replace(costs, plain_head=costs.head.scaled(1.3))
    worth = Worth(costs, rows)
    worth.move(context)
    expected = costs.round(exit_layer, [drafted] * rows, context)
    assert worth.rounds(exit_layer)[drafted] == pytest.approx(expected)
    assert worth.plain_seconds == pytest.approx(costs.plain_round(rows, context))


@pytest.mark.parametrize("right", [True, False])
def test_a_layer_of_which_nothing_is_known_drafts_little_until_it_is(right):
    policy, lengths = Adaptive(made_up_costs(LAYERS), drafts=["exit"]), []
    for _ in range(10):
        plan = policy.plan([RowState(0, 40, 100)])
        drafted = plan.draft_lengths[0]
        lengths.append(drafted)
        outcome = RowOutcome(0, drafted, drafted if right else 0, (0.9,) * drafted)
        policy.observe(plan, [outcome], Seconds(draft=1e-3, verify=1e-3, head=1e-4))
    assert 0 < lengths[0] <= UNKNOWN
    assert lengths[-1] > 2 * UNKNOWN if right else 0 < sum(lengths) <= 4 * UNKNOWN * FIRST_REPLAN


@pytest.mark.parametrize("drafts", [DRAFTS, ("exit",)])
def test_rounds_that_nothing_changed_for_are_planned_as_they_would_be_anyway(drafts, monkeypatch):
    costs, found, planned = made_up_costs(LAYERS), [], []
    small = {name: getattr(costs, name).scaled(0.05) for name in ("plain", "head", "pick", "rest")}
    layers = {name: {1: getattr(costs, name)[1].scaled(0.05)} for name in ("early", "late")}
    costs = replace(costs, **small, **layers)  # of a model that is not looked into in every round
    decide = Adaptive._by_layers
    monkeypatch.setattr(Adaptive, "_by_layers", lambda *given, **named: planned.append(0) or decide(*given, **named))
    for alike in (Adaptive._next_alike, 0):
        monkeypatch.setattr(Adaptive, "_next_alike", alike)
        planned.clear()
        runs = [replay([trace], Adaptive(costs, drafts=drafts), costs) for trace in traces(0.8)]
        found.append([round_.plan for run in runs for round_ in run.rounds])
        if alike:
            assert len(planned) < 0.5 * len(found[0]), "most rounds are planned in short"
    assert found[0] == found[1]


def test_what_a_prompt_tells_is_decided_upon_in_the_round_that_follows():
    costs = made_up_costs(LAYERS)
    policy, row, decided = Adaptive(costs, drafts=("exit",)), RowState(0, 50, 500), []
    shadow = Shadow(
        tuple(range(1, LAYERS)), np.ones((LAYERS - 1, 16), bool), np.full((LAYERS - 1, 16), 0.99, np.float32)
    )
    policy.seed(row, shadow)
    for at in range(60):
        plan = policy.plan([row._replace(content_length=50 + at, room=500 - at)])
        if policy._alike > 1:
            break
        policy.observe(plan, [RowOutcome(0, 1, 1, (0.99,))], Seconds(draft=1e-4, verify=1e-3))
    assert policy._alike > 1, "the next rounds would be planned as this one"
    policy.seed(row, shadow)
    policy._deciding._decide = lambda rows: decided.append(len(rows))
    policy.plan([row._replace(content_length=120, room=430)])
    assert decided == [1]
