"""Second choices: how often they are right, where they are worth drafting, and that they cost little where not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.replay import replay
from selfspec.control.adaptive import Adaptive
from selfspec.control.plan import CONFIDENCE_EDGES, NUM_BINS, SecondChoices
from selfspec.control.planner import MOST_BESIDE
from selfspec.control.second_choices import BOUNDS, FIRST, FIRST_WEIGHT, HALF_LIFE, SecondRates, likely_seconds
from selfspec.control.worth import Worth
from tests.control.test_adaptive import LAYERS, traces
from tests.eval.replays import made_up_costs

# ------------------------------------------------------------------------------------------------------------- rates

observations = st.lists(st.tuples(st.integers(1, 3), st.floats(0, 1), st.booleans(), st.floats(0, 4000)), max_size=30)


@given(observations)
def test_a_layers_rate_is_its_decayed_share_shrunk_to_that_of_all_layers(seen):
    rates = SecondRates(4)
    for layer, confidence, is_right, tokens in seen:
        rates.add(layer, confidence, is_right)
        rates.pass_time(tokens)
    ages = np.cumsum([tokens for *_, tokens in seen][::-1])[::-1]
    weights = [2.0 ** (-age / HALF_LIFE) for age in ages]

    def group_of(confidence):
        return sum(confidence >= bound for bound in BOUNDS)

    def shrunk(layer, group, towards):
        pairs = zip(weights, seen, strict=True)
        members = [(w, r) for w, (at, c, r, _) in pairs if layer in (None, at) and group_of(c) == group]
        right = sum(weight for weight, is_right in members if is_right)
        return (right + FIRST_WEIGHT * towards) / (sum(w for w, _ in members) + FIRST_WEIGHT)

    for layer in range(1, 4):
        wanted = [shrunk(layer, group, shrunk(None, group, first)) for group, first in enumerate(FIRST)]
        bins = [group_of(edge) for edge in (0.0, *CONFIDENCE_EDGES)]
        assert rates.of(layer) == pytest.approx(tuple(wanted[group] for group in bins))


def test_what_one_layer_shows_is_expected_of_the_others_a_little():
    rates = SecondRates(4)
    for _ in range(60):
        rates.add(2, 0.9, True)
    seen, others = rates.of(2)[-1], rates.of(1)[-1]
    assert 1 > seen > others > 0.8 and rates.of(1) == rates.of(3)
    assert rates.of(2)[0] == FIRST[0]  # of what is unsure it tells nothing


# ------------------------------------------------------------------------------------------------------------- choices


@given(
    st.lists(st.floats(0, 1), max_size=10), st.floats(0, 0.3), st.floats(0, 1), st.integers(0, 8), st.floats(0.05, 1)
)
def test_none_are_drafted_unless_all_of_them_together_gain_enough(confidences, least, enough, most, right):
    rule = SecondChoices((right,) * NUM_BINS, (0.6,) * NUM_BINS, least, 99)
    chances = [right**at * (1 - right) * 0.6 for at in range(len(confidences))]
    free = likely_seconds(rule, confidences, most)
    gain = sum(chances[at] - least for at in free)
    if abs(gain - enough) > 1e-9:
        assert likely_seconds(rule._replace(enough=enough), confidences, most) == (free if gain > enough else [])


# ------------------------------------------------------------------------------------------------------------ adaptive


def seconds_of(texts, drafts, costs):
    return sum(replay([trace], Adaptive(costs, drafts=drafts), costs).seconds for trace in texts)


def with_seconds(acceptance, share):
    """Where a layer's first choice is wrong, its second is right so often."""
    texts = traces(acceptance)
    rng = np.random.default_rng(1)
    return [replace(trace, seconds=~trace.hits & (rng.random(trace.hits.shape) < share)) for trace in texts]


@pytest.mark.parametrize("acceptance", [0.5, 0.8])
def test_they_gain_where_they_are_right_and_cost_little_where_they_never_are(acceptance):
    costs = made_up_costs(LAYERS)
    alone, beside = ("exit",), ("exit", "tree")
    right, never = with_seconds(acceptance, 0.9), with_seconds(acceptance, 0.0)
    assert seconds_of(right, alone, costs) > 1.05 * seconds_of(right, beside, costs)
    assert seconds_of(never, alone, costs) > 0.97 * seconds_of(never, beside, costs)


@pytest.mark.parametrize("drafts", [("exit",), ("exit", "lookup"), ("exit", "tree")])
def test_they_are_drafted_beside_an_exit_where_branches_are_allowed(drafts):
    costs = made_up_costs(LAYERS)
    rounds = replay(with_seconds(0.6, 0.9), Adaptive(costs, drafts=drafts), costs).rounds
    exits = [round_.plan for round_ in rounds if round_.plan.exit_layer]
    assert exits and all((plan.second_choices is not None) == ("tree" in drafts) for plan in exits)
    assert all(plan.second_choices.most <= MOST_BESIDE for plan in exits if plan.second_choices)
    more = [row.num_drafted - n for r in rounds for row, n in zip(r.rows, r.plan.draft_lengths, strict=True)]
    assert "tree" in drafts or max(more) <= 0


@pytest.mark.parametrize("exit_layer", [1, 3, 6])
@pytest.mark.parametrize("drafted", [1, 4, 12])
def test_worth_and_costs_agree_on_what_tokens_beside_a_draft_add(exit_layer, drafted):
    costs = made_up_costs(LAYERS)
    fixed, each = Worth(costs, 1).beside(exit_layer, drafted)
    without = costs.round(exit_layer, [drafted])
    for count in (1, 3, 5):
        added = costs.round(exit_layer, [drafted], beside=[count]) - without
        assert fixed + count * each == pytest.approx(added, rel=0.05, abs=1e-6)
