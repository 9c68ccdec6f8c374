"""DEL on a model of four layers, against statistics worked out by hand."""

from __future__ import annotations

from math import nan

import pytest

from selfspec.control.del_ import DynamicExit
from selfspec.control.plan import Plan
from selfspec.control.rows import RowOutcome, Shadow
from tests.control.rounds import ask, row, tell


def seeded(policy, *layers, request_id=0):
    """Show a prompt's end: per layer, the confidences of hits and those of misses."""
    for layer, (sure, unsure) in enumerate(layers, 1):
        hits = (True,) * len(sure) + (False,) * len(unsure)
        policy.seed(row(request_id), Shadow((layer,), (hits,), ((*sure, *unsure),)))
    return policy


# TPL with 4 layers: half right at layer 1 is 1.5 / 5 = .3 at one token; three quarters right at layer 2 is 1.75 / 6 =
# .292, and at layer 3 at most .25.
HALF, MOSTLY = ((0.9, 0.7), (0.5, 0.3)), ((0.9, 0.9, 0.9), (0.1,))


def test_del_starts_with_one_token_of_the_first_layer_and_looks_at_all_others():
    policy = DynamicExit(4)
    assert policy.seed_layers(row()) == (1, 2, 3)
    plan = ask(policy, row(0), row(1))
    assert plan == Plan(1, (1, 1), keep_confidence=True, shadow=((2, 3), (0, 1), 19, True))


def test_del_exits_where_tokens_per_layer_are_most_and_stops_midway_between_right_and_wrong():
    plan = ask(seeded(DynamicExit(4), HALF, MOSTLY, MOSTLY))
    assert (plan.exit_layer, plan.draft_lengths) == (1, (18,))
    assert plan.min_confidence == pytest.approx((0.8 + 0.4) / 2)
    # Nine of ten right at layer 2: (1 + .9 + .81 + .729) / 10 = .344 at three tokens.
    better = ask(seeded(DynamicExit(4), HALF, ((0.9,) * 9, (0.1,)), MOSTLY))
    assert (better.exit_layer, better.min_confidence) == (2, pytest.approx(0.5))
    assert better.shadow.layers == (1, 3)


def test_del_decays_old_counts_and_counts_drafts_up_to_the_first_refused():
    policy = seeded(DynamicExit(4), HALF, MOSTLY, MOSTLY)
    plan = ask(policy)
    wrong = Shadow((2, 3), ((False, False),) * 2, ((0.5, 0.5),) * 2)
    tell(policy, RowOutcome(0, 3, 1, (0.95, 0.2, 0.01), shadow=wrong), plan=plan)
    # Layer 1 has .95 * 2 + 1 hits and as many misses, with .95 * 1.6 + .95 and .95 * .8 + .2 of confidence.
    after = ask(policy)
    assert (after.exit_layer, after.min_confidence) == (1, pytest.approx((2.47 / 2.9 + 0.96 / 2.9) / 2))
    # Two hits each at layer 2: (.95 * 3 + 2) / (.95 * 4 + 2) = .836 right, (1 + .836 + .699) / 8 = .317 > .3.
    right = Shadow((2, 3), ((True, True), (False, False)), ((0.5, 0.5),) * 2)
    policy = seeded(DynamicExit(4), HALF, MOSTLY, MOSTLY)
    tell(policy, RowOutcome(0, 3, 1, (0.95, 0.2, 0.01), shadow=right), plan=ask(policy))
    assert ask(policy).exit_layer == 2


def test_del_never_stops_by_confidence_where_a_layer_was_never_wrong_or_never_right():
    surest = ask(seeded(DynamicExit(4), ((0.9, 0.8), ()), HALF, HALF))
    assert (surest.exit_layer, surest.draft_lengths, surest.min_confidence) == (1, (18,), 0)
    worst = ask(seeded(DynamicExit(4), ((), (0.3,)), ((), (0.3,)), ((), (0.3,))))
    assert (worst.draft_lengths, worst.min_confidence) == ((18,), 0)


def test_del_leaves_out_layers_never_observed():
    policy = DynamicExit(4)
    policy.seed(row(), Shadow((2,), ((False, False),), ((nan, 0.1),)))
    plan = ask(policy)
    assert (plan.exit_layer, plan.min_confidence) == (2, 0)
    assert DynamicExit(2).plan([row()]).shadow is None  # there is no other layer to look at


def test_del_pools_the_rows_of_a_batch():
    policy = seeded(DynamicExit(4), ((0.9,), ()), MOSTLY, MOSTLY, request_id=0)
    seeded(policy, ((), (0.3,)), MOSTLY, MOSTLY, request_id=1)
    plan = ask(policy, row(0), row(1))  # half right at layer 1
    assert (plan.exit_layer, plan.min_confidence) == (1, pytest.approx(0.6))


def test_del_keeps_what_it_saw_of_prompts_still_being_read():
    policy = seeded(DynamicExit(4), HALF, MOSTLY, MOSTLY, request_id=5)
    ask(policy, row(3))
    assert ask(policy, row(5)).min_confidence == pytest.approx(0.6)
    ask(policy, row(6))
    assert ask(policy, row(5)).draft_lengths == (1,)  # forgotten with the row
