"""Statistics: a histogram per request, and figures that follow from it."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from selfspec.decoding.outputs import SpecStats
from tests.helpers import check_stats

ROUNDS = [(4, 4, 5), (4, 1, 2), (4, 0, 1), (2, 2, 3), (0, 0, 1), (3, 2, 2)]  # drafted, accepted, emitted


def made(rounds):
    stats = SpecStats()
    for drafted, accepted, emitted in rounds:
        stats.add_round(drafted, accepted, emitted)
    return stats


def test_figures_follow_from_the_rounds_by_hand():
    stats = made(ROUNDS)
    assert stats.acceptance_histogram_by_draft_length == {4: {4: 1, 1: 1, 0: 1}, 2: {2: 1}, 3: {2: 1}}
    assert stats.acceptance_histogram == Counter({4: 1, 2: 2, 1: 1, 0: 1})
    assert (stats.num_spec_steps, stats.num_plain_steps) == (5, 1)
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (17, 9)
    assert stats.num_generated_tokens == 14
    assert stats.mean_acceptance_length == 1 + 9 / 5
    assert stats.draft_acceptance_rate == 9 / 17
    # position 1: 4 of 5 steps; 2: 3 of 5, of the 4 that got there; 3: 1 of the 4 that drafted it, of 2; 4: 1 of 3, of 1
    assert stats.acceptance_by_position() == [(4 / 5, 4 / 5), (3 / 5, 3 / 4), (1 / 4, 1 / 2), (1 / 3, 1 / 1)]
    told = json.loads(json.dumps(stats.as_dict()))
    assert told.pop("acceptance_histogram") == {"0": 1, "1": 1, "2": 2, "4": 1}
    assert told.pop("acceptance_by_position")[1] == {"joint": 3 / 5, "conditional": 3 / 4}
    assert told == {name: getattr(stats, name) for name in told}


def test_positions_that_no_step_reached_are_not_listed():
    stats = made([(128, 2, 3), (128, 0, 1), (1, 1, 2)])
    assert stats.acceptance_by_position() == [(2 / 3, 2 / 3), (1 / 2, 1 / 1), (0.0, 0.0)]
    assert stats.as_dict()["acceptance_histogram"] == {"0": 1, "1": 1, "2": 1}
    assert made([(4, 4, 5), (9, 0, 1)]).acceptance_by_position()[4:] == []


def test_a_request_without_drafts_has_an_acceptance_length_of_one():
    stats = made([(0, 0, 1)] * 3)
    assert (stats.mean_acceptance_length, stats.draft_acceptance_rate) == (1.0, 0.0)
    assert (stats.num_spec_steps, stats.num_plain_steps, stats.acceptance_by_position()) == (0, 3, [])
    assert SpecStats().mean_acceptance_length == 1.0


rounds_of_any_kind = st.lists(
    st.integers(0, 6).flatmap(lambda d: st.integers(0, d).map(lambda a: (d, a, a + 1))), max_size=20
)


@given(rounds_of_any_kind)
def test_the_identities_between_figures_hold_for_any_rounds(rounds):
    check_stats(made(rounds))


@given(rounds_of_any_kind, rounds_of_any_kind)
def test_a_sum_is_what_all_rounds_together_give_and_changes_neither_part(one, other):
    left, right = made(one), made(other)
    assert left + right == made(one + other)
    assert (left, right) == (made(one), made(other))
