"""How often copies are right where the layers are, and whom their misses are held against."""

from __future__ import annotations

import numpy as np
import pytest

from selfspec.control.adaptive import Adaptive
from selfspec.control.agreement import AS_GOOD, BELIEVED, HALF_LIFE, KNOWN, OVERALL, Agreement
from selfspec.control.fading import Passed
from selfspec.control.plan import SEED_POSITIONS
from selfspec.control.rows import RowState, Shadow
from tests.control.rounds import play
from tests.control.test_adaptive import LAYERS
from tests.control.test_parts import with_copies
from tests.eval.replays import made_up_costs


def test_full_agreement_is_believed_until_something_came():
    seen = Agreement(LAYERS, Passed())
    assert seen.pooled == 1 and not seen.is_good and (seen.ratios() == 1).all()
    seen.add(2, 10.0, 40.0)
    assert seen.pooled == pytest.approx(30 / 60) and seen.is_known and not seen.is_good
    ratios = seen.ratios()
    assert ratios[1] < ratios[0] == pytest.approx(0.5)


def test_it_is_never_more_than_full_and_older_observations_fade():
    passed = Passed()
    seen = Agreement(LAYERS, passed)
    seen.add(1, 0.0, 60.0)
    before = seen.pooled
    passed.tokens += 10 * HALF_LIFE
    assert before < AS_GOOD < seen.pooled
    seen.add(1, 50.0, 10.0)
    assert seen.pooled == 1 and seen.ratios().max() == 1


def test_it_is_known_once_more_tokens_came_than_are_believed_and_is_forgotten():
    passed = Passed()
    seen = Agreement(LAYERS, passed)
    for _ in range(int(KNOWN * BELIEVED)):
        assert not seen.is_known and not seen.is_good
        seen.add(1, 0.9, 1.0)
    assert seen.is_good and seen.is_known
    passed.tokens += 40 * HALF_LIFE
    assert not seen.is_known and not seen.is_good


def test_a_later_one_starts_from_what_was_seen_and_from_nothing_that_is_nonsense():
    passed = Passed()
    seen = Agreement(LAYERS, passed)
    seen.add(2, 10.0, 40.0)
    passed.tokens += 100
    seen.add(3, 5.0, 6.0)
    later = Agreement(LAYERS, Passed(), seen.state())
    assert later.state() == seen.state()
    assert later.ratios().argmin() == 1 and later.ratios()[1] < 0.5 and not later.is_good
    passed.tokens += 2.5 * OVERALL
    kept = Agreement(LAYERS, Passed(), seen.state()).pooled
    assert kept < AS_GOOD < seen.pooled, "it is kept for longer than it holds"
    much = Agreement(LAYERS, Passed(), [[0.0] * (LAYERS - 1), [1000.0] * (LAYERS - 1)])
    for _ in range(4):
        much.add(1, 100.0, 100.0)
    assert much.ratios()[0] > 0.8, "what comes soon says more"
    ones, short = [1.0] * (LAYERS - 1), [1.0] * (LAYERS - 2)
    for given in (None, 3, "x", [ones], [short, short], [ones, [float("nan")] * (LAYERS - 1)], [ones, [-1.0, *short]]):
        assert Agreement(LAYERS, Passed(), given).pooled == 1


def drafted_by(policy, costs, copies_are_right, num_rounds):
    """By what a policy drafts, round by round, where layers are always right and their copies always, or never."""
    rounds = play(policy, costs, num_rounds, lambda plan, n: n if plan.draft_bits is None or copies_are_right else 0)
    return [one.plan.draft_bits if one.exit_layer else "plain" for one in rounds]


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
    recent = policy.tracker.recent
    assert recent[0].sum() > 0 and recent[1].sum() == 0


def test_copies_that_were_never_right_do_not_draft_first_in_a_later_text():
    costs = with_copies(made_up_costs(LAYERS), faster=1.5)
    policy = policy_of(costs)
    drafted_by(policy, costs, False, 300)
    state = policy.state()
    assert drafted_by(policy_of(costs, state), costs, False, 1) == [None]
    state = {name: told for name, told in state.items() if name not in ("agreement", "correction")}
    assert drafted_by(policy_of(costs, state), costs, False, 1) == [4], "it says nothing else of copies"
