"""Tables between, at and beyond their points; costs add up, travel as plain numbers, and refuse what is none."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.control.costs import CONTEXT, LOOKUP_SECONDS, Copies, Costs, RoundLimits, Table
from selfspec.core import LOOKUP

seconds = st.floats(0, 1, allow_nan=False)
points = st.integers(1, 300)
measured = st.dictionaries(points, seconds, min_size=1, max_size=9)


def line(start, slope, at=(1, 2, 4, 8, 16)):
    return Table(tuple(at), tuple(start + slope * (n - 1) for n in at))


def some_costs(context=1e-6):
    """Eight layers; every table a straight line of its own."""
    return Costs(
        8,
        rounds={1: line(12.0, 0.9), 4: line(14.0, 3.6)},
        steps={1: line(1.6, 1.0), 4: line(2.9, 2.0)},
        head=line(0.6, 0.06),
        context=Table((1, 4), (8 * context, 32 * context)),
        shadow_picks=line(0.3, 0.003),
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


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 7), st.floats(0, 5000), st.floats(0, 1))
def test_a_round_is_the_sum_of_its_parts(lengths, exit_layer, context, share):
    costs, rows = some_costs(), len(lengths)
    stages = costs.stages(exit_layer, lengths, context, share)
    assert costs.round(exit_layer, lengths, context, share) == pytest.approx(sum(stages.values()))
    live = [sum(length >= step for length in lengths) for step in range(1, max(lengths) + 1)]
    steps = [costs.step(exit_layer, n, context, share) for n in live]
    assert stages["draft"] == pytest.approx(sum(steps) + costs.step(exit_layer, rows, context, 0.0))
    assert stages["verify"] == pytest.approx(costs.verify(exit_layer, rows, sum(lengths) + rows, context))


def test_a_round_by_hand():
    costs = some_costs()
    # One row drafts two tokens at layer 2: two steps, a pass of the early layers without the head over the last of
    # them, and six of eight layers, and a head, over three tokens.
    by_hand = 2 * 2.6 + (2.6 - 0.6) + 6 / 8 * (12.0 + 2 * 0.9 - 0.72) + 0.72
    assert costs.round(2, (2,)) == pytest.approx(by_hand)
    assert costs.plain_round(1) == 12.0 and costs.plain_round(2) == pytest.approx(12 + 2 / 3)  # between 1 and 4 rows
    assert costs.round(LOOKUP, (2,)) == pytest.approx(13.8 + LOOKUP_SECONDS)
    assert costs.round(LOOKUP, (0,)) == pytest.approx(costs.plain_round(1) + LOOKUP_SECONDS)
    assert costs.step(2, 2) == pytest.approx(2.6 + (4.9 - 2.6) / 3)
    assert costs.round(2, (2,), draft_share=0.25) == pytest.approx(by_hand - 2 * 0.75 * 0.6)
    with_copies = replace(costs, copies=Copies({1: line(0.4, 0.25)}, line(0.15, 0.015)))
    assert with_copies.round(2, (2,), copies=True) == pytest.approx(2 * 0.65 + 13.8)


@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 7), st.integers(0, 4000))
def test_more_of_anything_never_costs_less(rows, length, exit_layer, context):
    costs = some_costs()
    one = costs.round(exit_layer, (length,) * rows, context)
    assert one <= costs.round(exit_layer, (length + 1,) * rows, context)
    assert one <= costs.round(exit_layer, (length,) * (rows + 1), context)
    assert one <= costs.round(exit_layer, (length,) * rows, context + 100)


def test_a_longer_context_costs_more_for_many_rows_and_wide_passes():
    costs = replace(some_costs(context=1e-3), width=0.5)
    assert costs.reading(1, CONTEXT + 100) == pytest.approx(0.8) and costs.reading(1, CONTEXT - 1) == 0
    assert costs.reading(4, CONTEXT + 100, width=3) == pytest.approx(3.2 * 2)

    def longer(*how):
        return costs.round(*how, CONTEXT + 100) - costs.round(*how, 5)

    assert longer(None, (0, 0)) == pytest.approx(2 * 0.8)
    assert longer(3, (0, 0)) == pytest.approx(2 * 0.8)
    # three passes of 3 of 8 layers, and 5 of 8 layers over 3 tokens
    assert longer(3, (2, 2)) == pytest.approx((3 * 3 / 8 + 5 / 8 * 2) * 1.6)
    assert longer(LOOKUP, (2, 0)) == pytest.approx(1.5 * 1.6)  # two tokens per row in the mean


def test_shadow_picks_cost_a_shortlist_or_the_whole_head():
    costs = some_costs()
    assert costs.shadow(0, 4) == costs.seed(0, 4) == 0
    assert costs.shadow(2, 4) == costs.shadow_picks(8)
    assert costs.shadow(2, 4, exact=True) == pytest.approx(costs.head(8))
    assert costs.seed(2, 4) == pytest.approx(costs.head(4) + costs.shadow_picks(8))


# --------------------------------------------------------------------------------------------------- plain numbers


@given(measured, measured, st.floats(0, 1e-3))
def test_costs_survive_a_file(one, other, width):
    a, b = Table.of(one), Table.of(other)
    costs = Costs(7, {1: a, 3: b}, {1: b}, head=b, context=a, shadow_picks=b, width=width)
    if width:
        costs = replace(costs, copies=Copies({1: a}, b), recorded=RoundLimits(15, 64, 8))
    assert Costs.from_dict(json.loads(json.dumps(costs.as_dict()))) == costs


def _broken(**changes):
    return {**some_costs().as_dict(), **changes}


BAD = {
    "not a dict": [1, 2],
    "a part is missing": {name: value for name, value in some_costs().as_dict().items() if name != "head"},
    "an empty table": _broken(head={}),
    "a point that is no number": _broken(head={"one": 1.0}),
    "negative": _broken(head={"1": -1.0}),
    "NaN": _broken(head={"1": float("nan")}),
    "no single row": _broken(steps={"2": {"1": 1.0}}),
    "no rows": _broken(rounds={}),
    "context that is no table": _broken(context=0.1),
    "width infinite": _broken(width=float("inf")),
    "copies without a head": _broken(copies={"steps": {"1": {"1": 1.0}}}),
    "layers": _broken(num_layers="many"),
}


@pytest.mark.parametrize("given_", BAD.values(), ids=BAD.keys())
def test_a_bad_dict_is_refused(given_):
    with pytest.raises(ValueError, match="not a table of costs"):
        Costs.from_dict(copy.deepcopy(given_))
