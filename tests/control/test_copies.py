"""Drafts by copies of the layers: the policy finds out whether they are right where the layers are."""

from __future__ import annotations

import numpy as np
import pytest

from selfspec.control.adaptive import Adaptive
from selfspec.control.laps import Seconds
from selfspec.control.plan import SEED_POSITIONS
from selfspec.control.rows import RowOutcome, RowState, Shadow
from tests.control.test_adaptive import LAYERS
from tests.control.test_drafters import with_copies
from tests.eval.replays import made_up_costs


def drafted_by(policy, costs, copies_are_right, num_rounds):
    """By what a policy drafts, round by round, where layers are always right and their copies always, or never."""
    by, at = [], 0
    for _ in range(num_rounds):
        plan = policy.plan([RowState(0, 40 + at, 40_000 - at)])
        drafted = plan.draft_lengths[0] if plan.exit_layer else 0
        right = drafted if plan.draft_bits is None or copies_are_right else 0
        shadow = None
        if plan.shadow is not None:
            hits = np.ones((len(plan.shadow.layers), right + 1), bool)
            shadow = Shadow(plan.shadow.layers, hits, np.full(hits.shape, 0.9, np.float32))
        took = costs.stages(plan.exit_layer, [drafted], copies=plan.draft_bits is not None)
        outcome = RowOutcome(0, drafted, right, (0.9,) * drafted, shadow=shadow)
        policy.observe(plan, [outcome], Seconds(**took, shadow=1e-4 if shadow else 0.0))
        by.append(plan.draft_bits if plan.exit_layer else "plain")
        at += right + 1
    return by


def policy_of(costs, prior=None):
    policy = Adaptive(costs, prior, drafts=["exit", "copies"])
    policy.tell_copies(True)
    return policy


@pytest.mark.parametrize("copies_are_right", [True, False])
def test_layers_draft_where_they_are_right_and_their_copies_are_not(copies_are_right):
    costs = with_copies(made_up_costs(LAYERS), faster=1.5)
    last = drafted_by(policy_of(costs), costs, copies_are_right, 300)[-100:]
    assert last.count(4) > 80 if copies_are_right else last.count(None) > 80


def test_what_copies_get_wrong_at_first_is_not_held_against_a_layer_that_a_prompt_showed():
    costs = with_copies(made_up_costs(LAYERS), faster=1.5)
    policy, layers = policy_of(costs), tuple(range(1, LAYERS))
    hits = np.ones((len(layers), SEED_POSITIONS), bool)
    policy.seed(RowState(0, 40, 40_000), Shadow(layers, hits, np.full(hits.shape, 0.9, np.float32)))
    by = drafted_by(policy, costs, False, 40)
    assert by[0] == 4 and by[-1] is None
    assert np.sum(policy.state()["hits"]) > 0 and np.sum(policy.state()["misses"]) == 0


def test_copies_that_were_never_right_do_not_draft_first_in_a_later_text():
    costs = with_copies(made_up_costs(LAYERS), faster=1.5)
    policy = policy_of(costs)
    drafted_by(policy, costs, False, 300)
    state = policy.state()
    assert drafted_by(policy_of(costs, state), costs, False, 1) == [None]
    state = {name: told for name, told in state.items() if name not in ("agreement", "correction")}
    assert drafted_by(policy_of(costs, state), costs, False, 1) == [4], "it says nothing else of copies"
