"""Rounds are counted together, when somebody asks; what comes of that is what counting each at once gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control.experience import COUNTED_ROWS, KNOWN, MOST_RECORDED, Experience
from selfspec.control.laps import Seconds
from selfspec.control.plan import NUM_BINS, Plan, SurvivalStop
from selfspec.control.rows import RowOutcome, Shadow
from tests.eval.replays import made_up_costs

LAYERS = 8


def shadow(seed, columns):
    rng = np.random.default_rng(seed)
    return Shadow((1, 4), rng.random((2, columns)) < 0.7, rng.random((2, columns), np.float32))


@st.composite
def rounds(draw):
    """A round of some rows, drafted at layer 2 or plain; what the clock said of it, and how many idle ones follow."""
    exit_layer = draw(st.sampled_from([None, 2]))
    outcomes = []
    for row in range(draw(st.integers(1, 3))):
        drafted = draw(st.integers(1, 6)) if exit_layer else 0
        sure = tuple(draw(st.floats(0, 1)) for _ in range(drafted))
        seen = draw(st.sampled_from([None, shadow(row, 3)]))
        accepted = draw(st.integers(0, drafted))
        second = draw(st.sampled_from([None, True, False])) if accepted < drafted else None
        outcomes.append(RowOutcome(row, drafted, accepted, sure, shadow=seen, second=second))
    took = [draw(st.floats(1e-4, 1e-2)) for _ in range(8)]
    return Plan(exit_layer, (6,) * len(outcomes)), outcomes, Seconds(*took), draw(st.integers(0, 3))


def trust_after(plan, accepted, *counts):
    """In rounds of a layer that is not known, after so many rounds each of what was forecast anew."""
    seen = Experience(made_up_costs(LAYERS), None, False)
    seen.tracker.add(2, [True] * 20, [0.9] * 20)
    for count in counts:
        seen.expect(2, 50.0, [0.01 * n for n in range(7)])
        for _ in range(count):
            seen.add(plan, [RowOutcome(0, 6, accepted, (0.9,) * 6)], Seconds(), None)
    return seen.trusts()[-1]


def test_what_copies_get_wrong_is_not_held_against_forecasts_for_the_layers_until_it_is_known_how_good_they_are():
    stop = SurvivalStop((0.9,) * NUM_BINS, 0.1)
    by_layers, by_copies = (Plan(2, (6,), stop=stop, draft_bits=bits) for bits in (None, 4))
    assert trust_after(by_layers, 0, 6) < 0.7
    assert trust_after(by_copies, 0, 6) == 1
    assert trust_after(by_copies, 0, 80) == 1, "nor what was forecast before that"
    assert trust_after(by_copies, 6, 20, 10) > 1, "copies that are known tell of forecasts"
    assert trust_after(by_copies, 0, 60, 10) < 0.7


def test_what_copies_of_a_layer_that_nobody_knew_did_not_do_is_held_against_others_like_it():
    seen, stop = Experience(made_up_costs(LAYERS), None, False), SurvivalStop((0.9,) * NUM_BINS, 0.1)
    seen.tracker.add(2, [True] * 20, [0.9] * 20)
    seen.expect(3, 50.0, [0.01 * n for n in range(7)])
    for _ in range(6):
        seen.add(Plan(3, (6,), stop=stop, draft_bits=4), [RowOutcome(0, 6, 0, (0.9,) * 6)], Seconds(), None)
    trusts = seen.trusts()
    assert trusts[2 - 1] == 1 and trusts[5 - 1] < 0.7


@pytest.mark.parametrize("is_known", [True, False])
def test_what_a_layer_that_nobody_knew_did_not_do_is_not_held_against_those_that_are_known(is_known):
    seen, picks = Experience(made_up_costs(LAYERS), None, False), int(KNOWN) + 1
    for layer in (1, 2)[: 1 + is_known]:
        seen.tracker.add(layer, [True] * picks, [0.9] * picks)
    seen.expect(2, 50.0, [0.01 * n for n in range(7)])
    for _ in range(3):
        seen.add(Plan(2, (6,)), [RowOutcome(0, 6, 0, (0.9,) * 6)], Seconds(), None)
    trusts = seen.trusts()
    assert trusts.shape == (LAYERS - 1,) and trusts[2] == trusts[-1] < 0.9, "what is not known either is trusted less"
    assert trusts[0] == (trusts[-1] if is_known else 1.0)


@pytest.mark.parametrize(("num_rows", "every"), [(1, 1), (COUNTED_ROWS, 1), (2 * COUNTED_ROWS, 2), (32, 6)])
def test_of_large_batches_as_many_rows_are_counted_in_fewer_rounds(num_rows, every):
    seen, count = Experience(made_up_costs(LAYERS), None, False), 6
    for _ in range(count):
        outcomes = [RowOutcome(i, 1, 1, (0.9,)) for i in range(num_rows)]
        seen.add(Plan(2, (1,) * num_rows), outcomes, Seconds(), None)
    assert seen.tracker.overall[0].sum() == pytest.approx(count // every * num_rows, rel=0.01)


@given(st.lists(rounds(), max_size=2 * MOST_RECORDED))
def test_counting_rounds_together_is_counting_them_one_by_one(given_rounds):
    late, at_once = (Experience(made_up_costs(LAYERS), None, True) for _ in range(2))
    for one in (late, at_once):
        one.expect(2, 500.0, [0.01 * n for n in range(7)])
    for at, (plan, outcomes, seconds, num_idle) in enumerate(given_rounds):
        for one in (late, at_once):
            one.add(plan, outcomes, seconds, (100.0, 1.0) if at % 4 == 0 else None)
            for _ in range(num_idle):
                one.add_idle()
        assert (at_once.trusts() > 0).all()  # asks
    for name in ("recent", "lasting", "overall"):
        np.testing.assert_allclose(getattr(late.tracker, name), getattr(at_once.tracker, name))
    np.testing.assert_allclose(late.trusts(), at_once.trusts())
    assert late.second_rates.of(2) == pytest.approx(at_once.second_rates.of(2))
    for name in ("pick", "passes", "deciding"):
        assert getattr(late.pace, name) == getattr(at_once.pace, name)
