"""Tables between, at and beyond their points; costs add up, travel as plain numbers, and refuse what is none."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control.costs import CONTEXT, Copies, Costs, Table
from selfspec.core import LOOKUP

seconds = st.floats(0, 1, allow_nan=False)
points = st.integers(1, 300)
measured = st.dictionaries(points, seconds, min_size=1, max_size=9)


def line(start, slope, at=(1, 2, 4, 8, 16)):
    return Table(tuple(at), tuple(start + slope * (n - 1) for n in at))


def some_costs(context=1e-6):
    """Eight layers; every piece a straight line of its own."""
    return Costs(
        8,
        plain=line(10.0, 0.5),
        early={1: line(1.0, 1.0), 4: line(2.0, 2.0)},
        late={1: line(1.0, 0.1), 4: line(2.0, 0.4)},
        head=line(0.5, 0.05),
        pick=line(0.1, 0.01),
        rest=line(0.2, 0.02),
        short=line(0.3, 0.003),
        context=context,
    )


# ----------------------------------------------------------------------------------------------------------- table


@given(measured, st.floats(0, 600))
def test_a_table_never_falls_and_is_never_negative(values, at):
    table = Table.of(values)
    assert table.points == tuple(sorted(values))
    assert all(a <= b for a, b in pairwise(table.seconds))
    assert 0 <= table(at) <= table(at + 1) + 1e-12


def test_one_bad_reading_is_shared_with_its_neighbours():
    assert Table.of({1: 1.0, 2: 5.0, 3: 2.0, 4: 2.0, 5: 6.0}).seconds == (1.0, 3.0, 3.0, 3.0, 6.0)


@given(measured)
def test_a_table_is_exact_at_its_points_and_straight_between(values):
    table = Table.of(values)
    for point, value in zip(table.points, table.seconds, strict=True):
        assert table(point) == pytest.approx(value)
    for (a, x), (b, y) in pairwise(zip(table.points, table.seconds, strict=True)):
        assert table((a + b) / 2) == pytest.approx((x + y) / 2)


def test_beyond_its_ends_a_table_is_flat_below_and_goes_on_above():
    table = Table((2, 4, 8), (1.0, 2.0, 3.0))
    assert [table(n) for n in (0, 1, 2, 3, 12)] == [1.0, 1.0, 1.0, 1.5, 4.0]
    assert Table((3,), (1.0,))(99) == 1.0
    assert table.scaled(2)(8) == 6.0


@pytest.mark.parametrize(
    ("at", "values"),
    [((), ()), ((1, 1), (1.0, 2.0)), ((2, 1), (1.0, 2.0)), ((1,), (1.0, 2.0))]
    + [((1,), (bad,)) for bad in (-1.0, float("nan"), float("inf"))],
)
def test_what_is_no_table_is_refused(at, values):
    with pytest.raises(ValueError, match="a table"):
        Table(at, values)


# ----------------------------------------------------------------------------------------------------------- costs


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 7), st.floats(0, 5000), st.booleans())
def test_a_round_is_the_sum_of_its_parts(lengths, exit_layer, context, has_first):
    costs, rows = some_costs(), len(lengths)
    costs = replace(costs, first={1: line(3.0, 1.0), 4: line(5.0, 2.0)} if has_first else {})
    stages = costs.stages(exit_layer, lengths, context)
    assert costs.round(exit_layer, lengths, context) == pytest.approx(sum(stages.values()))
    live = [sum(length >= step for length in lengths) for step in range(max(lengths) + 1)]
    passes = [costs.early_pass(exit_layer, n, context, first=step == 0) for step, n in enumerate(live)]
    assert stages["draft"] == pytest.approx(sum(passes))
    tokens = sum(lengths) + rows
    assert stages["verify"] == pytest.approx(costs.verify(exit_layer, rows, tokens, context))
    picks = [*live[1:], tokens]
    assert stages["head"] == pytest.approx(sum(map(costs.head, picks)))
    assert stages["pick"] == pytest.approx(sum(map(costs.pick, picks)))
    assert stages["rest"] == costs.rest(rows)


def test_a_round_by_hand():
    costs = some_costs()
    # two tokens drafted at layer 2 by one row: three early passes, two heads of one token, six layers over three tokens
    by_hand = 3 * 2.0 + 6 * 1.2 + (0.5 + 0.5 + 0.6) + (0.1 + 0.1 + 0.12) + 0.2
    assert costs.round(2, (2,)) == pytest.approx(by_hand)
    assert costs.plain_round(1) == pytest.approx(10.0 + 0.5 + 0.1 + 0.2)
    assert costs.early_pass(2, 2) == pytest.approx(2.0 + (4.0 - 2.0) / 3)  # between one and four rows


@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 7), st.integers(0, 4000))
def test_more_of_anything_never_costs_less(rows, length, exit_layer, context):
    costs = some_costs()
    one = costs.round(exit_layer, (length,) * rows, context)
    assert one <= costs.round(exit_layer, (length + 1,) * rows, context)
    assert one <= costs.round(exit_layer, (length,) * (rows + 1), context)
    assert one <= costs.round(exit_layer, (length,) * rows, context + 100)


def test_the_head_after_a_whole_forward_has_a_price_of_its_own():
    costs, other = some_costs(), replace(some_costs(), plain_head=line(2.5, 0.05))
    assert other.plain_round(3) == pytest.approx(costs.plain_round(3) + 2.0)
    assert other.round(LOOKUP, (0, 0)) == pytest.approx(costs.round(LOOKUP, (0, 0)) + 2.0)
    assert other.round(LOOKUP, (2, 1)) == pytest.approx(costs.round(LOOKUP, (2, 1)) + 2.0)
    assert other.round(2, (2, 1)) == costs.round(2, (2, 1)), "early passes have brought the head into the caches"
    of_copies = [replace(each, copies=Copies(each.early, each.early, each.head)) for each in (costs, other)]
    without, after = (each.round(2, (2, 1), copies=True) for each in of_copies)
    assert after == pytest.approx(without + 2.0), "copies have a head of their own"
    assert replace(costs, plain_head=line(0.0, 0.0)).round(None, (0,)) == costs.round(None, (0,))


def test_a_rounds_first_pass_has_a_price_of_its_own():
    costs = replace(some_costs(), first={1: line(1.7, 1.0)})
    assert costs.round(2, (2,)) == pytest.approx(some_costs().round(2, (2,)) + 0.7)
    assert costs.early_pass(2, 1) == 2.0 and costs.early_pass(2, 1, first=True) == 2.7


def test_a_longer_context_costs_every_layer_alike():
    costs = some_costs(context=1e-3)
    for exit_layer in (None, 3):
        longer = costs.round(exit_layer, (0, 0), CONTEXT + 100) - costs.round(exit_layer, (0, 0), 5)
        assert longer == pytest.approx(8 * 2 * 100 * 1e-3)


def test_a_longer_context_costs_more_for_many_rows_and_wide_passes():
    costs = replace(some_costs(context=1e-3), context_width=5e-4)
    costs = replace(costs, contexts={3: Table((0, 50, 100), (0.0, 0.05, 0.2))})
    assert costs.reading(1, CONTEXT + 100) == pytest.approx(0.1) and costs.reading(1, CONTEXT - 1) == 0
    assert costs.reading(2, CONTEXT + 100) == pytest.approx((0.1 + 3 * 0.2) / 2)
    assert costs.reading(3, CONTEXT + 25) == pytest.approx(3 * 0.025) and costs.reading(3, CONTEXT) == 0
    assert costs.reading(3, CONTEXT + 120) == pytest.approx(3 * 0.24)  # as 100 in the mean
    assert costs.reading(7, CONTEXT + 100) == pytest.approx(7 * 0.2)  # as the most that were measured
    assert costs.reading(2, CONTEXT + 100, width=3) == pytest.approx(0.35 + 2 * 0.1)

    wider = replace(costs, context_widths=Table((1, 3), (5e-4, 1e-3)))
    assert wider.reading(1, CONTEXT + 100, 3) == costs.reading(1, CONTEXT + 100, 3)
    for rows, each in ((2, 7.5e-4), (3, 1e-3), (7, 1e-3)):
        further = wider.reading(rows, CONTEXT + 100, 3) - wider.reading(rows, CONTEXT + 100)
        assert further == pytest.approx(2 * rows * 100 * each)

    def longer(*how):
        return costs.round(*how[:2], CONTEXT + 100, *how[2:]) - costs.round(*how[:2], CONTEXT, *how[2:])

    assert longer(3, (2, 2)) == pytest.approx(
        (3 * 3 * 0.175 + 5 * 0.275) * 2
    )  # three passes of 3 layers, and 5 of 3 tokens
    assert longer(LOOKUP, (2, 0)) == pytest.approx(8 * 0.225 * 2)  # two tokens per row in the mean


@given(st.dictionaries(st.sampled_from([2, 3, 8]), st.tuples(seconds, seconds)), st.integers(1, 12), st.floats(1, 999))
def test_more_rows_and_longer_ones_never_take_less_to_read_whatever_was_measured(told, rows, beyond):
    contexts = {n: Table.of({0: 0.0, 64: one, 128: one + more}) for n, (one, more) in told.items()}
    costs, context = replace(some_costs(context=1e-3), contexts=contexts), CONTEXT + beyond
    reading = costs.reading(rows, context)
    assert 1e-3 * beyond <= reading * 1.000001
    assert reading <= costs.reading(rows + 1, context) * 1.000001
    assert reading <= costs.reading(rows, context + 10) * 1.000001


@pytest.mark.parametrize(("padding", "context"), [(1.0, 300), (0.0, 200), (0.25, 225)])
def test_rows_of_different_lengths_are_read_as_far_as_each_goes_or_as_the_longest(padding, context):
    costs = replace(some_costs(), padding=padding)
    assert costs.context_of([100, 300]) == pytest.approx(context) and costs.context_of([300]) == 300
    assert Costs.from_dict(json.loads(json.dumps(costs.as_dict()))).padding == padding


def test_shadow_picks_cost_a_shortlist_or_the_whole_head():
    costs = some_costs()
    assert costs.shadow(0, 4) == costs.seed(0, 4) == 0
    assert costs.shadow(2, 4) == costs.short(8)
    assert costs.shadow(2, 4, exact=True) == pytest.approx(costs.head(8) + costs.pick(8))
    assert costs.seed(2, 4) == pytest.approx(costs.head(4) + costs.short(8))


def test_what_is_made_of_costs_is_made_once_and_not_of_others():
    costs = some_costs()
    made = costs.cached("mine", lambda: [1])
    assert costs.cached("mine", lambda: [2]) is made
    assert replace(costs, plain_head=None).cached("mine", lambda: [2]) == [2]


# --------------------------------------------------------------------------------------------------- plain numbers


@given(measured, measured, st.floats(0, 1e-3))
def test_costs_survive_a_file(one, other, context):
    a, b = Table.of(one), Table.of(other)
    first, one_more = {1: b, 3: a} if context else {}, Table((0, 9), (0.0, context))
    costs = Costs(7, a, {1: a, 3: b}, {1: b}, head=b, pick=a, rest=a, short=b, context=context, first=first)
    costs = replace(
        costs,
        contexts={2: one_more, 4: one_more} if context else {},
        context_width=context,
        plain_head=b if context else None,
    )
    costs = replace(costs, context_widths=costs.plain_head)
    assert Costs.from_dict(json.loads(json.dumps(costs.as_dict()))) == costs


def _broken(**changes):
    return {**some_costs().as_dict(), **changes}


BAD = {
    "not a dict": [1, 2],
    "a part is missing": {name: value for name, value in some_costs().as_dict().items() if name != "head"},
    "an empty table": _broken(pick={}),
    "a point that is no number": _broken(plain={"one": 1.0}),
    "negative": _broken(plain={"1": -1.0}),
    "NaN": _broken(plain={"1": float("nan")}),
    "no first pass of a single row": _broken(first={"2": {"1": 1.0}}),
    "no single row": _broken(early={"2": {"1": 1.0}}),
    "no rows": _broken(late={}),
    "context NaN": _broken(context=float("nan")),
    "contexts of a single row": _broken(contexts={"1": {"0": 0.0, "64": 1.0}}),
    "contexts that begin with something": _broken(contexts={"2": {"0": 1.0, "64": 2.0}}),
    "context by width infinite": _broken(context_width=float("inf")),
    "padding beyond the longest row": _broken(padding=1.5),
    "layers": _broken(num_layers="many"),
}


@pytest.mark.parametrize("given_", BAD.values(), ids=BAD.keys())
def test_a_bad_dict_is_refused(given_):
    with pytest.raises(ValueError, match="not a table of costs"):
        Costs.from_dict(copy.deepcopy(given_))
