"""The published policies that set lengths for a whole batch, against numbers worked out by hand."""

from __future__ import annotations

from math import exp

import pytest

from selfspec.control.goodput import SmartSpec, Synergy
from selfspec.control.heuristics import DSDE
from selfspec.control.plan import Plan
from selfspec.control.rows import RowOutcome
from tests.control.rounds import ask, costs, row, tell


def calibrated(policy, divergences, accepted, request_id=0):
    for count in accepted:
        tell(policy, RowOutcome(request_id, 5, count, divergences=divergences))
    return policy


def test_dsde_calibrates_and_then_drafts_by_divergence():
    policy = DSDE(1)
    assert ask(policy) == Plan(1, (5,), keep_divergence=True)
    calibrated(policy, (0.1, 0.1), [1, 3, 2])
    assert ask(policy).draft_lengths == (5,)
    calibrated(policy, (0.1, 0.1), [1])  # SL max = 3 (1 + .1 / .1) = 6, SL = 2 + (2 - exp(.2)) 4 = 5.11
    assert ask(policy).draft_lengths == (6,)
    tell(policy, RowOutcome(0, 6, 0, divergences=(1.0,)))  # SF = exp(2) - 1 > 1
    assert ask(policy).draft_lengths == (2,)


def test_dsde_weighs_the_newest_divergences_against_a_longer_window():
    policy = DSDE(1)
    ask(policy)
    calibrated(policy, (0.0,) * 5, [4, 0, 0, 0])  # SL max = 4
    tell(policy, RowOutcome(0, 4, 0, divergences=(0.1,)))
    # One of 10 and of 21 differs: variances p (1 - p) with p = .15 / (1 - .85^10) and .15 / (1 - .85^21).
    short, long = (p * (1 - p) for p in (0.15 / (1 - 0.85**10), 0.15 / (1 - 0.85**21)))
    assert short / long == pytest.approx(1.159, abs=1e-3)
    assert policy._rows[0].predicted == pytest.approx(2 + (1 - (exp(0.2) - 1) * short / long) * 2)
    tell(policy, RowOutcome(0, 10, 10, divergences=(0.1,) * 10))  # steady again
    assert ask(policy).draft_lengths == (4,)


def test_dsde_drafts_no_more_than_the_batchs_mean():
    policy = DSDE(1)
    ask(policy, row(0), row(1))
    calibrated(policy, (0.1, 0.1), [1, 3, 2, 1], request_id=0)  # SL = 5.11
    calibrated(policy, (3.0,), [0, 0, 0, 0], request_id=1)  # SL = 2
    assert ask(policy, row(0), row(1)).draft_lengths == (4, 2)


# ------------------------------------------------------------------------------------------------- smartspec, synergy


def smart(accepted, judged, **options):
    """A policy at its second decision, when so many of its judged tokens were accepted."""
    policy = SmartSpec(1, costs(), **options)
    misses = judged - 2 * accepted
    rounds = [(2, 1)] * accepted + [(1, 0)] * misses
    for drafted, hits in [*rounds, *[(0, 0)] * (20 - len(rounds))]:
        ask(policy)
        tell(policy, RowOutcome(0, drafted, hits))
    return policy


def test_smartspec_drafts_while_goodput_rises():
    # Of .8: 1.1 / 4, 1.8 / 5, 2.44 / 6, 2.952 / 7 = .4217, 3.3616 / 8 = .4202 tokens per second.
    policy = SmartSpec(1, costs())
    assert ask(policy) == Plan(1, (3,))
    assert policy.goodput(3, 1, 10) == pytest.approx(2.952 / 7)
    assert ask(SmartSpec(1, costs(), most=2)).draft_lengths == (2,)


def test_smartspec_demands_a_tenth_more_than_plain_decoding_gives():
    assert ask(smart(8, 20)).draft_lengths == (1,)  # 1.4 / 5 = .28
    assert ask(smart(7, 20)) == Plan(None, (0,))  # 1.35 / 5 = .27, above 1 / 4 but below 1.1 / 4


def test_smartspec_decides_every_twenty_rounds():
    policy = SmartSpec(1, costs())
    for _ in range(20):
        assert ask(policy).draft_lengths == (3,)
        tell(policy, RowOutcome(0, 3, 0))
    assert ask(policy).draft_lengths == (0,)


def test_smartspec_is_off_in_a_large_batch_but_for_a_probe_after_two_hundred_rounds():
    policy, rows = SmartSpec(1, costs()), [row(i) for i in range(8)]
    seen = [ask(policy, *rows).draft_lengths[0] for _ in range(221)]  # 8 * 1.8 / (2 + 6) < 1.1 * 8 / 4
    assert seen == [0] * 200 + [8] * 20 + [0]


def test_smartspec_shares_the_batchs_tokens_out_by_acceptance():
    policy, rows = SmartSpec(1, costs(slow_batch=2000)), [row(0), row(1)]
    assert ask(policy, *rows).draft_lengths == (3, 3)
    tell(policy, RowOutcome(0, 10, 9), RowOutcome(1, 4, 3))
    for _ in range(6):
        tell(policy, RowOutcome(1, 1, 0))
    assert ask(policy, *rows).draft_lengths == (4, 2)  # .9 and .3: int(.5 + 4 / 1.2 * rate) + 1
    assert ask(policy, row(1), row(2)).draft_lengths == (2, 4)  # a new row counts as .7
    ask(policy, row(0))
    tell(policy, RowOutcome(0, 1, 0))
    assert ask(policy, row(0)).draft_lengths == (3,)  # none accepted: nothing to share by


def test_synergy_shortens_drafts_as_the_batch_grows_and_ends_with_plain_decoding():
    # One row: 4, 5 / 1.9 = 2.63, 6 / 2.318 = 2.59, 7 / 2.647 = 2.64. Three: 4, 5.86 / 1.9 = 3.08, 7.71 / 2.318 = 3.33.
    policy = Synergy(1, costs())
    assert policy.table([1, 3, 8]) == {1: 2, 3: 1, 8: 0}
    assert ask(policy, row(0), row(1, room=1), row(2)) == Plan(1, (1, 0, 1))
    assert ask(policy, *(row(i) for i in range(8))) == Plan(None, (0,) * 8)


def test_synergy_goes_by_a_measured_acceptance_curve():
    assert Synergy(1, costs(), accepted=(0, 0.1)).length(1) == 0
    assert Synergy(1, costs(), accepted=(0, 1, 2, 3)).length(1) == 3
