"""Seconds of rounds in arrays are those of `Costs`, and tokens per second are what adding up gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.control import planner
from selfspec.control.drafters import BY_LAYERS, MOST, Drafter
from selfspec.control.ledger import Ledger
from selfspec.control.plan import NUM_BINS, SurvivalStop
from selfspec.control.planner import Candidates, Decision, Evidence, decide
from selfspec.control.times import CONTEXT_STEP
from tests.control.rounds import LAYERS, even_costs, times_of, with_dear_contexts

EXITS = range(1, LAYERS)
contexts = st.integers(0, 14).map(lambda n: (n + 0.5) * CONTEXT_STEP)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, LAYERS - 1), st.sampled_from([1, 4]), contexts)
def test_the_limit_of_a_layer_is_what_it_promises_if_it_is_always_right(layer, rows, context):
    costs = with_dear_contexts(even_costs())
    candidates = Candidates(costs, times_of(costs, rows, context), EXITS)
    limit = max(rows * (1 + n) / costs.round(layer, [n] * rows, context) for n in range(1, MOST + 1))
    assert candidates.limits()[layer - 1] == pytest.approx(limit)
    assert layer in candidates.could_pay(0.999 * limit)
    assert layer not in candidates.could_pay(1.001 * limit)
    right = np.ones((LAYERS - 1, NUM_BINS))
    assert candidates.rates(right, right / NUM_BINS, rows == 1)[0][layer - 1].max() <= 1.001 * limit


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, NUM_BINS - 1), st.integers(1, LAYERS - 1), st.integers(1, MOST))
def test_tokens_per_second_of_a_stop_are_what_adding_up_all_drafts_gives(seed, bin_, exit_layer, cap):
    rng = np.random.default_rng(seed)
    right, share = np.sort(rng.random((LAYERS - 1, NUM_BINS)), 1), rng.random((LAYERS - 1, NUM_BINS))
    share /= share.sum(1, keepdims=True)
    costs, line = even_costs(), exit_layer - 1
    candidates = Candidates(costs, times_of(costs, 1), EXITS)
    rates, drafted, _ = candidates.rates(right, share, True)
    verified = right[line] >= candidates.keep[line]  # others end the draft and are withdrawn
    withdrawn, share = share[line, ~verified].sum(), share * verified
    on, also_right = share[line, bin_:].sum(), (share * right)[line, bin_:].sum()
    rounds = [costs.round(exit_layer, [n]) for n in range(MOST + 1)]
    none = candidates.seconds[line, 0]  # the only drafted token is withdrawn
    added = rounds[1] - none
    chance, expected, kept, seconds = 1.0, 0.0, 0.0, 0.0
    for length in range(1, cap + 1):  # the chance that a draft has this many tokens, and that so many are right
        chance_here = chance * (1 - on if length < cap else 1.0)
        expected += length * chance_here
        seconds += (rounds[length] - length * withdrawn * added) * chance_here
        kept += also_right ** (length - 1) * (share * right)[line].sum()
        chance *= on
    assert drafted[line, bin_, cap - 1] == pytest.approx(expected, rel=1e-6)
    assert (1 + kept) / rates[line, bin_, cap - 1] == pytest.approx(seconds, rel=1e-6)


def test_tokens_that_do_not_pay_for_their_verification_are_withdrawn():
    costs, line = even_costs(), 1
    candidates = Candidates(costs, times_of(costs, 1), EXITS)
    right = np.full((LAYERS - 1, NUM_BINS), 0.9)
    share = np.full((LAYERS - 1, NUM_BINS), 1 / NUM_BINS)
    right[:, : NUM_BINS // 2] = 0.5 * candidates.keep[line]
    rates, _, _ = candidates.rates(right, share, True)
    candidates.keep[:] = 0
    whole, _, _ = candidates.rates(right, share, True)
    assert rates[line].max() > 1.02 * whole[line].max()
    assert not Candidates(costs, times_of(costs, 4), EXITS).keep.any(), "a round of several rows has one length"


@given(st.integers(1, LAYERS - 1), st.integers(0, MOST), st.sampled_from([1, 4]), contexts)
def test_rounds_take_what_costs_say(exit_layer, drafted, rows, context):
    costs = with_dear_contexts(even_costs())
    times = times_of(costs, rows, context)
    expected = costs.round(exit_layer, [drafted] * rows, context)
    if not drafted:  # a withdrawn one
        least = costs.plain_round(rows, context) + costs.head(rows)
        expected = max(expected + costs.withdrawal(exit_layer, rows, context), least)
    assert times.drafts(BY_LAYERS)[exit_layer - 1, drafted] == pytest.approx(expected)
    assert times.plain_seconds == pytest.approx(costs.plain_round(rows, context))


def test_rows_draft_on_together_while_their_mean_survival_pays():
    stop = SurvivalStop((0.5,) * NUM_BINS, least=0.4)
    assert stop.goes_on([0.9, 0.1]) and stop.goes_on([0.4])
    assert not stop.goes_on([0.9, 0.1, 0.1]) and not stop.goes_on([0.39])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.2, 0.95))
def test_a_screened_choice_is_as_good_as_one_among_all_stop_rules(seed, acceptance):
    rng = np.random.default_rng(seed)
    shape = LAYERS - 1, NUM_BINS
    right, share = np.sort(rng.beta(8 * acceptance, 8 * (1 - acceptance), shape), 1), rng.random(shape)
    evidence = Evidence(right, share / share.sum(1, keepdims=True), np.full(LAYERS - 1, 50.0), np.ones(LAYERS - 1))
    costs = even_costs(head=2e-4)
    sizes = [BY_LAYERS, *[Drafter(8192 * n, n / 4, 0.8 + n / 20) for n in (1, 2)]]
    candidates = Candidates(costs, times_of(costs, 1), EXITS, sizes, ledger=Ledger(0.0, costs.plain_round(1)))
    assert len(candidates.pairs) > planner.FINALISTS
    screened = decide(Decision(), candidates, evidence).usual
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "FINALISTS", len(candidates.pairs))
        assert screened >= 0.97 * decide(Decision(), candidates, evidence).usual
