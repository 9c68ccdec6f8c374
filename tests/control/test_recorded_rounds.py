"""Plans of rounds from recordings: few lengths and layers, nothing that stopping early would save, and no more rows."""

from dataclasses import replace

import pytest

from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs, RoundLimits
from selfspec.control.drafters import RECORDED_LENGTHS, recorded_exits
from selfspec.core import LOOKUP, Plan
from tests.control.rounds import Match, Tally, costs, play, sequence, settled

LIMITS = RoundLimits(longest=15, tokens=64, rows=4)


def recorded(limits=LIMITS):
    return replace(costs(unit=1e-4), recorded=limits)


@pytest.mark.parametrize("right", [0, 1, 2, 9])
def test_drafts_have_few_lengths_and_no_stop_rule(right):
    given = recorded()
    done = play(Adaptive(given), given, 300, lambda plan, n: min(n, right))
    drafting = sum(one.exit_layer is not None for one in done[200:])
    assert drafting > 50 if right else drafting < 20
    for one in done:
        assert one.plan.stop is None
        assert set(one.plan.draft_lengths) <= {0, *RECORDED_LENGTHS}
        assert one.plan.shadow is None or one.plan.exit_layer is None


@pytest.mark.parametrize("most", [None, 2, 3])
@pytest.mark.parametrize("right", [0, 1, 3, 9])
def test_what_rounds_draft_is_named_before_decoding(right, most):
    """What is named is recorded at start, so that no round waits for a recording."""
    given = recorded()
    policy = Adaptive(given, most=most)
    named = {(one.exit_layer, one.draft_lengths) for one in policy.likely(1)}
    lookup = Match(40, [Tally(50, (50,) * 10, (25 * (right % 2),) * 10)] * 400)
    done = play(policy, given, 400, lambda plan, n: min(n, right), lookup=lookup)
    kinds = set()
    for one in done:
        plan = one.plan
        kinds.add((plan.exit_layer, plan.shadow is not None))
        assert (plan.exit_layer, plan.draft_lengths) in named
        assert plan.shadow is None or plan.exit_layer is None, "a plain round returns what probes read"
        if plan.lookups is not None:
            most_found = max(max(lengths) for lengths in plan.lookups.lengths)
            assert most_found <= max(max(one.draft_lengths) for one in policy.likely(1) if one.exit_layer == LOOKUP)
    assert len(kinds) > 1
    assert policy.likely(5) == [Plan(None, (0,) * 5)], "more rows than are recorded do not draft"


@pytest.mark.parametrize("most", [1, 5, 30])
def test_a_users_limit_is_part_of_the_decision(most):
    given = recorded()
    done = play(Adaptive(given, most=most), given, 200)
    assert max(max(one.plan.draft_lengths) for one in done) == {1: 1, 5: 4, 30: 4}[most]


def test_a_length_is_kept_where_another_gains_little():
    """Each change makes a recording, whose time a small gain does not repay."""
    given, dice = recorded(), iter(range(10_000))
    done = play(Adaptive(given), given, 900, lambda plan, n: min(n, 2 + next(dice) % 3))
    lengths = [one.plan.draft_lengths[0] for one in done[300:] if one.exit_layer]
    assert len(set(lengths)) <= 2


@pytest.mark.parametrize(("num_rows", "longest"), [(1, 15), (2, 15), (3, 15), (4, 15), (5, 0), (9, 0)])
def test_more_rows_than_are_recorded_do_not_draft(num_rows, longest):
    policy = Adaptive(recorded(), exit_layers=[1])
    for _ in range(num_rows):
        policy.tracker.add_draft(1, 20, (0.9,) * 20)
    tallies = [Tally(50, (50,) * 10, (50,) * 10)] * 9
    rows = [sequence(i, lookup=Match(40, tallies)) for i in range(num_rows)]
    plan = settled(policy, *rows).plan(rows)
    assert max(plan.draft_lengths) <= longest and (plan.exit_layer is not None) == (longest > 0)
    if plan.lookups is not None:
        assert 0 < max(max(lengths) for lengths in plan.lookups.lengths) <= longest


def test_all_rows_of_a_verification_share_its_places():
    limits = RoundLimits(longest=15, tokens=256, rows=32)
    assert [limits.draft_length(rows) for rows in (1, 8, 16, 17, 32)] == [15, 15, 15, 7, 7]


def test_limits_are_kept_in_a_profile():
    assert Costs.from_dict(recorded().as_dict()) == recorded()
    with pytest.raises(ValueError, match="not a table of costs"):
        Costs.from_dict({**recorded().as_dict(), "recorded": [1]})


@pytest.mark.parametrize("num_layers", [2, 3, 4, 30, 32, 80])
def test_exit_layers_lie_in_the_first_half(num_layers):
    exits = recorded_exits(num_layers)
    assert exits[0] >= 1 and exits[-1] <= -(-num_layers // 2) and len(exits) <= 3


def test_other_exit_layers_can_be_asked_for():
    policy = Adaptive(recorded(), exit_layers=[3])
    policy.tracker.add_draft(3, 40, (0.9,) * 40)
    row = sequence(0, 100)
    assert settled(policy, row).plan([row]).exit_layer in (3, None)
