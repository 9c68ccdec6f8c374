"""How often drafts are right: what is counted, how it fades, and what is believed of what was not seen."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.control.acceptance import Agreement, Decayed, TokenClock, Tracker, is_prior, read_prior
from selfspec.control.plan import CONFIDENCE_EDGES, NUM_BINS, confidence_bin
from selfspec.core import ShadowPicks
from tests.control.rounds import LAYERS

# ------------------------------------------------------------------------------------------------------ decayed counts


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 5), st.floats(0, 4000), st.booleans()), max_size=30))
def test_an_observation_counts_half_after_every_half_life_whenever_it_is_asked_for(seen):
    clock, half_life = TokenClock(), 50.0
    counts = Decayed((3,), half_life, clock)
    for cell, amount, tokens, asks in seen:
        counts.add(cell, amount)
        clock.tokens += tokens
        if asks:
            counts.now()
    ages = [*accumulate(tokens for _, _, tokens, _ in reversed(seen))][::-1]
    wanted = [0.0] * 3
    for (cell, amount, *_), age in zip(seen, ages, strict=True):
        wanted[cell] += amount * 2 ** (-age / half_life)
    assert counts.now().tolist() == pytest.approx(wanted)


# -------------------------------------------------------------------------------------------------------------- layers

BIN = confidence_bin(0.9)


def seen_of(tracker):
    """(hits, misses), by layer and bin."""
    state = tracker.state()
    return np.array(state["hits"]), np.array(state["misses"])


def test_layers_never_seen_have_the_prior_and_no_nan():
    right, share = Tracker(5).estimates()
    assert right.shape == share.shape == (4, NUM_BINS)
    assert np.isfinite(right).all() and np.isfinite(share).all()
    assert (np.diff(right, axis=0) > 0).all()  # the deeper, the oftener right
    np.testing.assert_allclose(share.sum(1), 1)


def test_a_shadow_counts_for_every_layer_it_saw():
    tracker = Tracker(4)
    confidences = np.array([[0.1, 0.9], [0.6, 0.999]], np.float32)
    tracker.add_shadow(ShadowPicks((1, 3), np.array([[True, False], [True, True]]), confidences))
    hits, misses = seen_of(tracker)
    assert hits[0, confidence_bin(0.1)] == misses[0, BIN] == 1
    assert hits[2, confidence_bin(0.6)] == hits[2, confidence_bin(0.999)] == 1
    assert hits.sum() == 3 and misses.sum() == 1


@given(st.integers(0, 6), st.lists(st.floats(0, 1, width=32), max_size=6), st.integers(1, 3))
def test_of_a_draft_the_first_tokens_are_hits_and_the_others_misses(right, confidences, layer):
    of_draft, one_by_one = Tracker(4), Tracker(4)
    of_draft.add_draft(layer, right, tuple(confidences))
    for at, confidence in enumerate(confidences):
        one_by_one.add(layer, [at < right], [confidence])
    assert of_draft.state() == one_by_one.state()
    assert of_draft.num_lasting(layer) == len(confidences)


def test_estimates_come_to_what_is_seen():
    tracker = Tracker(3)
    for i in range(600):
        tracker.add(1, [i % 10 != 0], [0.75])
        tracker.add(2, [i % 10 == 0], [0.75])
        tracker.pass_time(1)
        if i % 5 == 0:
            right, share = tracker.estimates()
    column = confidence_bin(0.75)
    assert right[0, column] == pytest.approx(0.9, abs=0.05) and right[1, column] == pytest.approx(0.1, abs=0.06)
    assert share[0, column] > 0.9


def test_estimates_follow_a_change_of_the_text():
    tracker = Tracker(3)
    for is_right in (True, False):
        for _ in range(100):
            tracker.add(1, [is_right], [0.9])
            tracker.pass_time(1)
            right, _ = tracker.estimates()
    assert right[0, BIN] < 0.3


def test_what_was_seen_at_one_confidence_tells_of_others():
    tracker = Tracker(3)
    for _ in range(12):
        tracker.add(1, [False] * 5, [0.7] * 5)
        right, _ = tracker.estimates()
    assert right[0, BIN] < 0.5 < right[1, BIN]


def test_of_a_layer_that_was_long_not_seen_a_little_is_remembered():
    tracker = Tracker(4)
    for layer, hit in ((1, False), (3, True)):
        tracker.add(layer, [hit] * 60, [0.9] * 60)
    tracker.pass_time(2000)
    assert tracker.num_lasting(1) < 0.001
    right, _ = tracker.estimates()
    unknown, _ = Tracker(4).estimates()
    assert right[0, BIN] < unknown[0, BIN] - 0.2 and right[2, BIN] > unknown[2, BIN]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_estimates_are_probabilities_that_rise_with_confidence(data):
    layers = data.draw(st.integers(2, 6))
    tracker = Tracker(layers)
    for _ in range(data.draw(st.integers(0, 25))):
        count = data.draw(st.integers(0, 6))
        hits = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        confidences = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
        tracker.add(data.draw(st.integers(1, layers - 1)), hits, confidences)
        tracker.pass_time(data.draw(st.integers(0, 100_000)))
        if data.draw(st.booleans()):
            tracker.estimates()
    right, share = tracker.estimates()
    assert ((right > 0) & (right < 1)).all() and (np.diff(right, axis=1) >= 0).all()
    assert (share >= 0).all()
    np.testing.assert_allclose(share.sum(1), 1)


# --------------------------------------------------------------------------------------------------------------- priors


def of_many_texts():
    tracker = Tracker(4)
    for i in range(400):
        tracker.add(2, [i % 4 != 0] * 3, [0.9] * 3)
        tracker.pass_time(1)
    return tracker.state()


def test_a_tracker_starts_from_an_earlier_ones_state_and_what_comes_soon_says_more():
    tracker = Tracker(4, of_many_texts())
    assert tracker.estimates()[0][1, BIN] == pytest.approx(0.75, abs=0.03)
    for _ in range(20):
        tracker.add(2, [False] * 5, [0.9] * 5)
        tracker.pass_time(1)
    assert tracker.estimates()[0][1, BIN] < 0.35


def test_a_state_remembers_more_texts_than_the_last_and_what_came_is_added_to_it():
    tracker = Tracker(4)
    tracker.add(1, [True] * 400, [0.9] * 400)
    tracker.pass_time(2000)
    tracker.add(1, [False] * 20, [0.9] * 20)
    hits, misses = seen_of(tracker)
    assert hits[0, BIN] == pytest.approx(200) and misses[0, BIN] == pytest.approx(20)
    again = Tracker(4, tracker.state())
    again.add(1, [True], [0.9])
    assert seen_of(again)[0][0, BIN] == pytest.approx(201)


def test_what_is_saved_again_and_again_does_not_grow_for_ever():
    state = {"edges": list(CONFIDENCE_EDGES), "hits": [[1e9] * NUM_BINS] * 3, "misses": [[0.0] * NUM_BINS] * 3}
    assert seen_of(Tracker(4, state))[0].sum() < 1e5


@pytest.mark.parametrize(
    "given_",
    [
        None,
        [],
        {},
        {"edges": [], "hits": [], "misses": []},
        {"edges": list(CONFIDENCE_EDGES), "hits": [[1.0] * NUM_BINS] * 2, "misses": [[1.0] * NUM_BINS] * 2},
        {"edges": list(CONFIDENCE_EDGES), "hits": [[-1.0] * NUM_BINS] * 3, "misses": [[1.0] * NUM_BINS] * 3},
        {"edges": list(CONFIDENCE_EDGES), "hits": [["x"] * NUM_BINS] * 3, "misses": [[1.0] * NUM_BINS] * 3},
        {"edges": [0.5], "hits": [[1.0] * NUM_BINS] * 3, "misses": [[1.0] * NUM_BINS] * 3},
        {"edges": 3, "hits": [[1.0] * NUM_BINS] * 3, "misses": [[1.0] * NUM_BINS] * 3},
    ],
)
def test_a_state_of_something_else_is_refused(given_):
    assert not is_prior(given_, 4)
    with pytest.raises(ValueError, match="not a prior"):
        read_prior(given_, 4)


# --------------------------------------------------------------------------------------------------------------- copies


def test_full_agreement_is_believed_until_something_came():
    copies = Agreement(LAYERS, TokenClock())
    assert copies.pooled == 1 and not copies.is_good and (copies.ratios() == 1).all()
    copies.add(2, 10.0, 40.0)
    assert 0.25 < copies.pooled < 0.75 and copies.is_known and not copies.is_good
    ratios = copies.ratios()
    assert ratios[1] < ratios[0] == pytest.approx(copies.pooled), "of an exit that was not seen, the mean is believed"


def test_agreement_is_never_more_than_full_and_older_observations_fade():
    passed = TokenClock()
    copies = Agreement(LAYERS, passed)
    copies.add(1, 0.0, 60.0)
    before = copies.pooled
    passed.tokens += 1e5
    assert before < 0.5 < 0.99 < copies.pooled and not copies.is_known
    copies.add(1, 50.0, 10.0)
    assert copies.pooled == 1 and copies.ratios().max() == 1


def test_a_later_agreement_starts_from_what_was_seen_and_from_nothing_that_is_nonsense():
    passed = TokenClock()
    seen = Agreement(LAYERS, passed)
    seen.add(2, 10.0, 40.0)
    passed.tokens += 100
    seen.add(3, 5.0, 6.0)
    later = Agreement(LAYERS, TokenClock(), seen.state())
    assert later.state() == seen.state()
    assert later.ratios().argmin() == 1 and later.ratios()[1] < 0.5 and not later.is_good
    much = Agreement(LAYERS, TokenClock(), [[0.0] * (LAYERS - 1), [1000.0] * (LAYERS - 1)])
    for _ in range(4):
        much.add(1, 100.0, 100.0)
    assert much.ratios()[0] > 0.8, "what comes soon says more"
    ones, short = [1.0] * (LAYERS - 1), [1.0] * (LAYERS - 2)
    for given_ in (None, 3, "x", [ones], [short, short], [ones, [float("nan")] * (LAYERS - 1)], [ones, [-1.0, *short]]):
        assert Agreement(LAYERS, TokenClock(), given_).pooled == 1
