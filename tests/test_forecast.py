"""What measured costs imply: draft lengths and speedups by acceptance rate."""

from __future__ import annotations

import pytest

from selfspec.calibrate import forecast
from selfspec.control.costs import Costs, Table


def flat_costs(num_layers=8, knee=None):
    """Every layer takes 1 whatever its width, or grows beyond `knee` tokens; head and all else are free."""
    points = (1, 2, 4, 8, 16, 32, 64)
    grow = Table(points, tuple(1.0 if knee is None else max(1.0, n / knee) for n in points))
    free = Table((1,), (0.0,))
    depths = tuple(range(1, num_layers + 1))
    widths = (1, 2, 4, 8, 18)
    steps = {rows: Table(depths, tuple(e * grow(rows) for e in depths)) for rows in points}
    rounds = {rows: Table(widths, tuple(num_layers * grow(rows * n) for n in widths)) for rows in points}
    return Costs(num_layers, rounds, steps, free, free, free)


def test_expected_tokens_are_a_geometric_sum():
    assert forecast.expected_tokens(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    assert forecast.expected_tokens(1.0, 4) == 5 and forecast.expected_tokens(0.0, 4) == 1


@pytest.mark.parametrize(
    ("acceptance", "exit_layer", "length", "speedup"),
    [(0.5, 1, 2, 1.40), (0.7, 1, 4, 1.85), (0.9, 1, 9, 3.07), (0.5, 2, 1, 1.20), (0.8, 2, 3, 1.69)],
)
def test_where_layers_cost_the_same_at_any_width_the_forecast_is_the_known_one(acceptance, exit_layer, length, speedup):
    """T = d E + L layers: the best d and the speedup at an eighth and a quarter of the layers, worked out by hand."""
    choice = forecast.choose(flat_costs(), 1, exit_layer, acceptance)
    assert choice.num_speculative_tokens == length and choice.speedup == pytest.approx(speedup, abs=0.006)


def test_beyond_the_knee_drafts_shorten_and_then_end():
    costs = flat_costs(knee=16)
    lengths = [forecast.choose(costs, rows, 1, 0.8).num_speculative_tokens for rows in (1, 4, 8, 16, 32)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] >= 4 and lengths[-1] == 0
    assert forecast.choose(costs, 32, 1, 0.8).speedup == 1


@pytest.mark.parametrize(
    ("prior", "rates"),
    [
        (None, {}),
        ({}, {}),
        ({"hits": 3, "misses": 4}, {}),
        ({"hits": [[1]], "misses": [["a"]]}, {}),
        ({"hits": [[8, 8], [2, 3]], "misses": [[2, 2], [1, 1]]}, {1: 0.8}),  # the second layer was hardly seen
        ({"hits": [[20]] * 9, "misses": [[0]] * 9}, {1: 1.0, 2: 1.0, 3: 1.0}),
    ],
)
def test_rates_come_from_layers_that_were_seen(prior, rates):
    assert forecast.rates_of(prior, 4) == rates


def test_without_a_good_layer_the_best_plan_is_plain():
    [choice] = forecast.seen(flat_costs(), [4], {4: 0.1, 6: 0.2})
    assert (choice.num_speculative_tokens, choice.speedup) == (0, 1.0)
