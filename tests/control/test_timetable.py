"""When decisions and looks at other layers come, and that what is foreseen of them holds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control.laps import Seconds
from selfspec.control.looks import (
    CALLING,
    EARLY_SHARE,
    LAST,
    OFF_SHARE,
    SHADOW_SHARE,
    STEP,
    WAITED_SHARE,
    WAITS,
    Looks,
    waited_of,
)
from selfspec.control.table import Table
from selfspec.control.timetable import (
    CLOCK_EVERY,
    DECIDING,
    DECIDING_SHARE,
    EARLY,
    EARLY_REPLAN,
    FIRST_REPLAN,
    FIRST_SHARE,
    MOST_FIRST,
    MOST_PUT_OFF,
    RAREST,
    REPLAN,
    SELDOM,
    SETTLED,
    Timetable,
)
from tests.eval.replays import made_up_costs

LAYERS = 8


def intervals(seconds, count, num_rows=1, is_known=True, has_prior=True):
    """Rounds from one decision to the next, of so many, where rounds take so long and layers draft all the time."""
    times, found = Timetable(has_prior), []
    times.begin()
    for at in range(count):
        times.decide_after(512)
        times.decide_while_drafting(num_rows, at == 0, is_known, seconds)
        found.append(times.until_due + 1)
        for _ in range(found[-1]):
            times.begin()
    return found


def test_texts_after_the_first_are_as_those_of_one_that_began_with_a_prior():
    times = Timetable()
    times.decide_while_drafting(1, True, True, 1e-3)
    assert times.until_due + 1 < intervals(1e-3, 1)[0]
    times.tell_prior()
    times.decide_while_drafting(1, True, True, 1e-3)
    assert times.until_due + 1 == intervals(1e-3, 1)[0]


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("after", [1, 6, 40, 100])
def test_rounds_that_say_nothing_of_layers_put_a_decision_off_as_far_as_is_foreseen(num_rows, after):
    times, rounds = Timetable(), 0
    times.begin()
    times.decide_after(after)
    foreseen = times.until_due + times.may_put_off(num_rows) * (after > 1)
    while not times.is_due:
        rounds += 1
        times.begin()
        times.put_off(num_rows)
    assert rounds - 1 == foreseen == max(after, MOST_PUT_OFF[num_rows > 1] if after > 1 else 0) - 1


@pytest.mark.parametrize("num_rows", [1, 4, 32])
def test_decisions_of_small_models_become_rarer_until_they_take_little_and_no_rarer_than_they_may_be(num_rows):
    slow = intervals(1.0, 8, num_rows)
    assert slow[0] <= slow[-1] == slow[-2] and slow[-1] >= REPLAN
    for seconds in (1e-2, 3e-3, 1e-3, 7e-4, 1e-9):
        found = intervals(seconds, 8, num_rows)
        assert found[0] <= max(slow[0], EARLY), "whether it was right to begin is asked soon"
        assert intervals(seconds, 1, num_rows, has_prior=False) == intervals(1.0, 1, num_rows, has_prior=False)
        assert found == sorted(found) and all(b <= max(2 * a, slow[-1]) for a, b in pairwise(found))
        assert found[-1] <= max(slow[-1], RAREST)
        share = DECIDING / (found[-1] * seconds)
        assert share <= DECIDING_SHARE or found[-1] == max(slow[-1], RAREST)
        assert share >= 0.5 * DECIDING_SHARE or found[-1] == slow[-1], "rarer than it has to be"
        unknown = intervals(seconds, 3, num_rows, is_known=False, has_prior=False)
        first = unknown[0] // (slow[-1] // REPLAN)
        assert set(unknown) == {unknown[0]} and FIRST_REPLAN <= first <= MOST_FIRST
        assert DECIDING / (first * seconds) <= FIRST_SHARE or first == MOST_FIRST
        assert first == FIRST_REPLAN or DECIDING / ((first - 1) * seconds) > FIRST_SHARE, "later than need be"
        assert intervals(seconds, 3, num_rows, is_known=False) == unknown, "whatever earlier texts told of other layers"
    assert intervals(1e-3, 8)[-1] > 2 * REPLAN
    assert intervals(0.0, 8, num_rows) == slow  # of a clock that was set back


def test_first_decisions_of_a_small_model_that_nothing_is_known_of_lie_ever_farther_apart():
    assert intervals(1.0, 3, has_prior=False) == [EARLY_REPLAN[False]] * 3
    found = intervals(1e-3, 4, has_prior=False)
    assert found[0] == EARLY_REPLAN[False] and found[:3] == sorted(found[:3]) and found[1] == 2 * found[0]


@pytest.mark.parametrize("drafted_at", [0, CLOCK_EVERY, SETTLED])
def test_plain_rounds_look_at_the_clock_and_are_asked_about_ever_more_rarely(drafted_at):
    """And none is passed over that looks at the clock, or decides."""
    times, clock, asked = Timetable(), [], []
    while times.round < 900:
        times.begin()
        if times.round == 1 or times.is_due:
            times.decide_after(333)
        if times.round == drafted_at:
            times.note_draft()
        asked.append(times.round)
        if times.has_clock:
            clock.append(times.round)
        else:
            times.look_ahead(1000)
            times.pass_ahead(times.ahead)
    since = drafted_at + SETTLED
    often, seldom = (set(range(every, 900, every)) for every in (CLOCK_EVERY, SELDOM))
    assert {n for n in often if n < since} | {n for n in seldom if n < 900} <= {*clock} and len(clock) < 15
    assert {1, 334, 667} <= {*asked} and len(asked) < 40


def looks_of(looking=3e-5):
    costs = replace(made_up_costs(LAYERS), short=Table.of({1: looking / 4, 64: looking}))
    return Looks(costs, has_prior=True)


def passed(looks, took, count, looking=3e-5):
    """In which of so many rounds of `took` seconds each looks come."""
    came = []
    for at in range(count):
        is_due = looks.are_due
        if is_due:
            came.append(at)
        looks.pass_round(1, False, Seconds(verify=took, shadow=looking if is_due else 0.0))
    return came


@given(st.floats(2e-4, 0.2), st.floats(5e-6, 2e-4), st.integers(0, 1 << 16))
def test_no_look_comes_before_the_round_that_was_foreseen_however_long_rounds_take(took, looking, seed):
    looks, rng = looks_of(looking), np.random.default_rng(seed)
    passed(looks, took, 1)
    for held_up in rng.lognormal(0.0, 0.5, 400):
        left, was_due = looks.rounds_left, looks.are_due
        looks.pass_round(1, False, Seconds(verify=took * held_up, shadow=looking if was_due else 0.0))
        if not was_due and left:
            assert not looks.are_due and looks.rounds_left >= left - 1


@pytest.mark.parametrize("slower", [0.0, 1e-3, 9.0])
def test_a_look_in_a_plain_round_takes_what_that_takes_longer_too(slower):
    """As far as it may be blamed for that, and not what heads take in any round."""
    looks, plain = looks_of(), Seconds(verify=3e-3, head=1e-3)
    for _ in range(40):
        looks.pass_idle(plain.verify + plain.head)
    before = looks._credit
    looks.pass_round(None, False, Seconds(verify=3e-3 + slower, head=1e-3, shadow=3e-5))
    calling = CALLING / (STEP - 1)  # of rounds of 4 ms: those of two come in as much time as many of small models
    taken = 3e-5 + DECIDING + calling + min(slower, 4e-3) - OFF_SHARE * 4e-3
    assert before - looks._credit == pytest.approx(taken, abs=1e-5)


@given(st.floats(1.1e-3, 2e-3), st.floats(0.8, 1.5))
def test_a_look_whose_round_has_come_is_not_put_off_for_a_little_that_is_unpaid(took, slower):
    looks = looks_of()
    passed(looks, took, 1)
    looks.pass_round(1, False, Seconds(verify=took, shadow=3e-5))
    left = looks.rounds_left
    assert 50 < left < 512
    for _ in range(left + 1):
        assert not looks.are_due
        looks.pass_round(1, False, Seconds(verify=took * slower))
    assert looks.are_due


def test_looks_that_are_cheap_beside_what_was_laid_by_do_not_come_round_by_round():
    looks = looks_of()
    looks.pass_idle(1.0, 1000)
    assert all(b - a >= STEP for a, b in pairwise(passed(looks, 1e-3, 200, 1e-6)))


def test_looks_of_a_small_model_pay_for_the_calls_that_they_end():
    took, looking, count = 1e-3, 3e-5, 6000
    came = passed(looks_of(looking), took, count, looking)
    assert came and all(b - a >= STEP for a, b in pairwise(came))
    assert len(came) * (looking + CALLING) <= 1.1 * SHADOW_SHARE[1] * took * count


def test_rounds_of_a_large_model_end_no_call_and_are_looked_at_as_soon_as_that_is_paid_for():
    took, looking, count = 2e-2, 3e-4, 600
    came = passed(looks_of(looking), took, count, looking)
    assert len(came) * looking == pytest.approx(SHADOW_SHARE[1] * took * count, rel=0.2)
    assert any(b - a < STEP for a, b in pairwise(came))


@given(st.lists(st.tuples(st.floats(-1.0, 1.0), st.booleans(), st.integers(1, 40)), max_size=40))
def test_a_clock_that_goes_backwards_and_hiccups_leave_looks_possible(rounds):
    looks = looks_of()
    for took, is_idle, count in rounds:
        if is_idle:
            looks.pass_idle(took, count)
        else:
            looks.pass_round(1, False, Seconds(verify=took, shadow=abs(took)))
        assert looks.rounds_left >= 0
    assert passed(looks, 1e-3, 20_000)


def test_the_first_look_of_a_text_that_takes_little_waits_until_it_is_little():
    short, long, first = (Looks(looks_of()._costs, has_prior=False) for _ in range(3))
    cost = DECIDING + short._costs.shadow(LAYERS - 1, 1)
    long.begin(1.01 * cost / EARLY_SHARE, 1e-3)
    short.begin(0.99 * cost / EARLY_SHARE, 1e-3)
    assert short.are_awaited and not long.are_awaited
    passed = 0.0
    while not short.are_due:
        short.pass_idle(1e-3)
        short.begin(0.0, 1e-3)
        passed += 1e-3
    assert passed == pytest.approx(cost / WAITED_SHARE, rel=0.2)
    short.pass_round(None, True, Seconds(verify=1e-3, shadow=1e-5))
    assert not short.are_awaited
    first.take_seed(1e-3)
    first.begin(0.0, 1e-3)
    assert not first.are_awaited and not first.are_due, "prompts tell, and are paid for, too"


def test_short_texts_that_nobody_looked_in_add_up_until_a_look_is_little_beside_all_of_them():
    costs, seconds = looks_of()._costs, 5e-3
    cost = DECIDING + costs.shadow(LAYERS - 1, 1)
    waited, texts = 0.0, 0
    while True:
        looks = Looks(costs, has_prior=False, waited=waited)
        looks.begin(seconds, 1e-3)
        if not looks.are_awaited:
            break
        for _ in range(5):
            looks.pass_idle(1e-3)
        waited, texts = waited_of({"waited": looks.waited}), texts + 1
        assert looks.waited == pytest.approx(texts * seconds), "looked in none"
    assert texts + 1 == math.ceil(cost / WAITED_SHARE / seconds)
    for tell in (
        lambda: looks.pass_round(None, True, Seconds(verify=1e-3, shadow=1e-5)),
        lambda: looks.take_seed(1e-5),
    ):
        looks.waited = 1.0
        tell()
        assert looks.waited == 0.0 and not looks.are_awaited, "then it begins anew"


@pytest.mark.parametrize(
    "given", [None, 3, {}, *({"waited": x} for x in (None, "1", True, [], -1.0, math.inf, math.nan))]
)
def test_no_time_was_waited_where_a_state_tells_nothing_of_it(given):
    assert waited_of(given) == 0.0
    assert waited_of({"waited": 3}) == 3.0


def test_nobody_waits_for_a_first_look_any_longer_than_there_is_need():
    cost = DECIDING + looks_of()._costs.shadow(LAYERS - 1, 1)
    for end in ("a long text", "a prompt"):
        looks = Looks(looks_of()._costs, has_prior=False)
        looks.begin(0.1 * cost / EARLY_SHARE, 1e-3)
        assert looks.are_awaited
        if end == "a prompt":
            looks.take_seed(1e-3)
        else:
            looks.begin(2 * cost / EARLY_SHARE, 1e-3)
        assert not looks.are_awaited
        looks.begin(0.0, 1e-3)
        assert not looks.are_awaited


def test_prompts_that_come_one_after_another_do_not_use_up_what_looks_may_take():
    looks = Looks(looks_of()._costs, has_prior=False)
    for _ in range(40):
        looks.take_seed(1e-3)
        looks.begin(1.0, 1e-3)
    num_rounds = 0
    while not looks.are_due:
        looks.pass_idle(1e-3)
        num_rounds += 1
    assert num_rounds < 1e-3 / (OFF_SHARE * 1e-3) * 1.5


def test_rows_that_are_about_to_end_are_not_looked_at_unless_all_of_them_are_short():
    looks = looks_of()
    passed(looks, 1e-3, 1)
    looks.tell_room(1000)
    until = next(n for n in range(500) if looks.are_due or looks.pass_round(1, False, Seconds(verify=1e-3)))
    assert 0 < until < 500
    looks.tell_room(LAST)
    waits = [looks.rounds_left]
    while not looks.are_due:
        looks.pass_round(1, False, Seconds(verify=1e-3))
        waits.append(looks.rounds_left)
    assert len(waits) - 1 == WAITS and waits[:-1] == list(range(WAITS - 1, -1, -1))  # as foreseen
    looks.tell_room(LAST + 1)  # in time rows are looked at as before
    assert looks.are_due


def test_a_look_that_comes_due_at_the_end_of_a_row_ends_no_call_before():
    looks = looks_of()
    passed(looks, 1e-3, 1)
    looks.tell_room(10**6)
    left = looks.rounds_left
    assert left > 0
    looks.tell_room(left + LAST)
    assert looks.rounds_left == left + WAITS
    looks.tell_room(left + LAST + 1)
    assert looks.rounds_left == left
