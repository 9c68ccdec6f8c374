"""Compiled estimates, choices and lengths of lookups beside those in Python."""

from __future__ import annotations

import threading
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.control import choosing, compiled_chooser
from selfspec.control.choosing import Chooser
from selfspec.control.compiled_chooser import CompiledChooser, chooser_of
from selfspec.control.compiled_tracker import CompiledTracker, tracker_of
from selfspec.control.compiled_weighing import CompiledWeighing, weighing_of
from selfspec.control.experience import KNOWN, Experience
from selfspec.control.finder import Finder, strength_of
from selfspec.control.laps import Seconds
from selfspec.control.matches import FIRST
from selfspec.control.parts import WHOLE, Part
from selfspec.control.pieces import Pieces
from selfspec.control.plan import NUM_BINS, Plan
from selfspec.control.rows import Looked, RowOutcome, Tally
from selfspec.control.table import Table
from selfspec.control.tracker import Tracker
from selfspec.control.weighing import Weighing
from selfspec.control.worth import Worth
from selfspec.kernels.compiled_call import functions
from tests.control.test_parts import with_copies
from tests.eval.replays import made_up_costs, with_dear_contexts

LAYERS = 8
PARTS = (WHOLE, Part(None, 1.0, 1.0, 4, 4), Part(16384, 0.125, 0.9), Part(16384, 0.125, 0.9, 4, 4))


def uneven(costs):
    """As machines are: steps in what some tokens take, and dear contexts."""
    steps = {1: 1e-3, 2: 1.4e-3, 3: 1.5e-3, 5: 2.2e-3, 9: 2.3e-3, 18: 5e-3, 80: 1e-2}
    return replace(with_dear_contexts(costs), late={rows: Table.of(steps) for rows in costs.late})


def both(prior=None):
    functions()
    trackers = Tracker(LAYERS, prior), tracker_of(LAYERS, prior)
    assert isinstance(trackers[1], CompiledTracker)
    return trackers


def told(trackers, rng, picks):
    """Both are told the same picks and drafts, of random layers, as sure as they are right or not."""
    for _ in range(picks):
        layer, sure = int(rng.integers(1, LAYERS)), float(rng.random())
        hit, passed = bool(rng.random() < sure * rng.random() ** 0.3), float(rng.integers(0, 4))
        drafted, right = rng.random(int(rng.integers(0, 6))).tolist(), int(rng.integers(0, 6))
        for tracker in trackers:
            tracker.add(layer, [hit], [sure])
            tracker.add_draft(LAYERS - layer, right, drafted)
            tracker.pass_time(passed)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 60), min_size=1, max_size=12), st.booleans())
def test_compiled_estimates_are_those_of_python(seed, picks, has_prior):
    rng, prior = np.random.default_rng(seed), None
    if has_prior:
        earlier = both()
        told(earlier, rng, 100)
        prior = earlier[0].state()
    trackers = both(prior=prior)
    for count in picks:
        told(trackers, rng, count)
        expected, found = (tracker.estimates() for tracker in trackers)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)
        np.testing.assert_allclose(trackers[1].totals, trackers[0].lasting.sum((0, 2)), rtol=1e-9)
        for name in ("recent", "lasting", "overall"):
            np.testing.assert_allclose(getattr(trackers[1], name), getattr(trackers[0], name), rtol=1e-9)
    assert trackers[0].state() == trackers[1].state()


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    picks=st.integers(0, 300),
    num_rows=st.sampled_from([1, 2, 4]),
    parts=st.lists(st.sampled_from(PARTS[1:]), unique=True).map(lambda more: [WHOLE, *more]),
    layers=st.sets(st.integers(1, LAYERS - 1), min_size=1).map(sorted),
    now=st.none() | st.tuples(st.sampled_from(PARTS), st.integers(1, 4)),
    margin=st.sampled_from([1.0, 1.1]),
    stay=st.sampled_from([0.02, 0.3]),
    sure=st.booleans(),
)
def test_the_compiled_choice_is_that_of_python(seed, picks, num_rows, parts, layers, now, margin, stay, sure):
    functions()
    rng, costs = np.random.default_rng(seed), uneven(with_copies(made_up_costs(LAYERS, head=5e-3), 3.0))
    experience = Experience(costs, None, False)
    told([experience.tracker], rng, picks)
    if sure:  # of every token: bounds of what is certain, and the longest drafts, come in
        for layer in layers:
            experience.tracker.add(layer, [True] * 400, [0.999] * 400)
    experience.tracker.estimates()
    for _ in range(20):
        experience.agreement.add(int(rng.integers(1, LAYERS)), float(1.5 * rng.random()), 1.0)
        experience._trust.add(float(rng.random()), 1.0)
        experience._trust_in_known.add(float(rng.random()), 1.0)
    compiled = chooser_of(experience, layers, LAYERS)
    assert isinstance(compiled, CompiledChooser)
    found = []
    for chooser in (Chooser(experience, layers, LAYERS), compiled):
        worth = Worth(costs, num_rows, 200.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tracker, "_fits_now", lambda self: False)  # both look at the same curves
            chooser.look()
            # What was chosen before, among more of them, leaves nothing.
            chooser.choose(PARTS, Worth(costs, num_rows), (PARTS[-1], 3), 1.1)
            for module in (choosing, compiled_chooser):
                patch.setattr(module, "STAY", stay)
            found.append((chooser.choose(parts, worth, now or (WHOLE, None), margin), worth))
    (expected, worth), (choice, other) = found
    assert (choice.part, choice.exit_layer) == (expected.part, expected.exit_layer)
    assert [*choice[2:6]] == pytest.approx([*expected[2:6]], rel=1e-9)
    for one, as_expected in ((choice.right, expected.right), (choice.share, expected.share)):
        assert len(one) == NUM_BINS and [*one] == pytest.approx([*as_expected], rel=1e-9)
    assert not other._known, "numpy priced nothing"
    rounds, as_expected = (each.rounds(choice.exit_layer) for each in (other, worth))
    assert rounds == pytest.approx(as_expected, rel=1e-9)  # priced in the way that was chosen
    assert compiled.limits(other) == pytest.approx(worth.limits().tolist(), rel=1e-9)
    is_known = experience.tracker.num_lasting(choice.exit_layer) >= KNOWN
    assert choice.trust == experience.trust_ratios[not is_known]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    drafts=st.sampled_from([("lookup",), ("lookup", "tree"), ("lookup", "recycle"), ("recycle",)]),
    most=st.none() | st.integers(1, 8),
    usual=st.floats(0.5, 6.0),
    beside_layers=st.booleans(),
    by_copies=st.booleans(),
    head=st.sampled_from([2e-4, 1e-1]),  # seconds: beside long forwards, calls may end for what branches there are
    known=st.booleans(),
)
def test_compiled_lengths_of_lookups_are_those_of_python(
    seed, drafts, most, usual, beside_layers, by_copies, head, known
):
    functions()
    rng, costs = np.random.default_rng(seed), uneven(with_copies(made_up_costs(LAYERS, head=head), 3.0))
    finder, worth = Finder(most, drafts), Worth(costs, 1, 200.0)
    worth.draft_by(1.0, by_copies)
    worth.price(1.3, (1.0, 1.0), 1e-4, 1.05)
    for _ in range(int(rng.integers(0, 60))):
        num_right = int(rng.integers(0, 40))
        looked = Looked(int(rng.integers(1, 60)), int(num_right + rng.integers(0, 4)), num_right)
        finder.matches.add(looked, int(rng.integers(0, 2)), bool(rng.random() < 0.5))
        finder.ranks.add([(0, bool(rng.random() < 0.5), int(rng.integers(0, 9)))])
        finder.trust_after(looked.match).add(float(3 * rng.random()), float(3 * rng.random()))
        finder.ease.add(strength_of(looked.match), float(3 * rng.random()), float(3 * rng.random()))
        finder.pass_time(float(rng.integers(0, 300)))
    if known:
        right = rng.integers(0, 30, len(FIRST))
        finder.matches.take(Tally(200, (right + rng.integers(0, 5, len(FIRST))).tolist(), right.tolist()), 1)
    weighing = weighing_of(finder)
    assert isinstance(weighing, CompiledWeighing)
    asked = 1, worth, usual / worth.plain_seconds, beside_layers
    for one, expected in zip(weighing.all(*asked), Weighing(finder).all(*asked), strict=True):
        assert (one.length, one.may_branch, one.grown) == (expected.length, expected.may_branch, expected.grown)
        assert [*one.chances] == pytest.approx([*expected.chances], rel=1e-9)
        assert [*one[1:4]] == pytest.approx([*expected[1:4]], rel=1e-9)


def test_a_compiled_choice_counts_what_came_before():
    functions()
    costs = made_up_costs(LAYERS)
    experience = Experience(costs, None, False)
    chooser = chooser_of(experience, [5], LAYERS)
    for _ in range(20):
        plan, outcome = Plan(5, (3,), keep_confidence=True), RowOutcome(0, 3, 3, (0.999,) * 3)
        experience.add(plan, [outcome], Seconds(), None)
    chooser.look()
    choice = chooser.choose([WHOLE], Worth(costs, 1), (WHOLE, None), 1.1)
    assert choice.share[-1] > 0.8, "other bins were not seen"


def test_threads_that_price_alike_share_one_table():
    made, pieces = [], Pieces(made_up_costs(LAYERS), 1)
    make = Pieces._make_table

    def slow(self, copies):
        made.append(make(self, copies))
        if len(made) == 1:
            other.start()
            other.join()  # which makes another one meanwhile, and tells where it is
        return made[0] if threading.current_thread() is not other else made[1]

    addresses = []
    other = Thread(target=lambda: addresses.append(pieces.address(False)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pieces, "_make_table", slow)
        addresses.append(pieces.address(False))
    assert len(made) == 2 and addresses == [pieces.table(False).ctypes.data] * 2
