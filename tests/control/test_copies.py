"""Drafts by copies of the layers: the policy finds out whether they are right where the layers are."""

from __future__ import annotations

import numpy as np
import pytest

from selfspec.control.adaptive import Adaptive
from selfspec.control.plan import SEED_POSITIONS
from selfspec.control.rows import RowState, Shadow
from tests.control.rounds import play
from tests.control.test_adaptive import LAYERS
from tests.control.test_drafters import with_copies
from tests.eval.replays import made_up_costs


def drafted_by(policy, costs, copies_are_right, num_rounds):
    """By what a policy drafts, round by round, where layers are always right and their copies always, or never."""
    rounds = play(policy, costs, num_rounds, lambda plan, n: n if plan.draft_bits is None or copies_are_right else 0)
    return [one.plan.draft_bits if one.exit_layer else "plain" for one in rounds]


def policy_of(costs, prior=None):
    policy = Adaptive(costs, prior, drafts=["exit", "copies"])
    policy.set_copies(True)
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
