"""Statistics of every layer: what is counted, how it fades, and what is believed where little has been seen."""

import math
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.control.plan import CONFIDENCE_EDGES, NUM_BINS, confidence_bin
from selfspec.control.priors import is_prior, read_prior
from selfspec.control.rows import Shadow
from selfspec.control.tracker import (
    CURVE_MEAN,
    DEPTH,
    LASTING,
    LOG_ODDS,
    MOST_WAITING,
    OVERALL,
    OVERALL_SIZE,
    PRIOR_SIZE,
    RECALLED,
    RECENT,
    Tracker,
)


def test_layers_never_seen_have_the_prior_and_no_nan():
    layers = 5
    right, share = Tracker(layers).estimates()
    assert right.shape == share.shape == (4, NUM_BINS)
    assert np.isfinite(right).all() and np.isfinite(share).all()
    offsets = CURVE_MEAN[0] + DEPTH * np.log(4 * np.arange(1, layers) / layers)[:, None]
    np.testing.assert_allclose(right, 1 / (1 + np.exp(-(offsets + CURVE_MEAN[1] * LOG_ODDS))))
    assert (np.diff(right, axis=0) > 0).all()  # the deeper, the oftener right
    np.testing.assert_allclose(share.sum(1), 1)
    assert all(math.isnan(mean) for mean in Tracker(5).mean_confidences(1))


def test_observations_fade_by_tokens_whenever_they_were_made(monkeypatch):
    monkeypatch.setattr("selfspec.control.tracker.RECALLED", 0.0)
    tracker = Tracker(3)
    tracker.add(1, [True], [0.9])
    tracker.pass_time(RECENT)
    tracker.add(1, [True, False], [0.9, 0.9])
    tracker.pass_time(RECENT)
    tracker.estimates()
    column = confidence_bin(0.9)
    assert tracker.recent[0, 0, column] == pytest.approx(0.25 + 0.5)
    assert tracker.recent[1, 0, column] == pytest.approx(0.5)
    fade = 0.5 ** (RECENT / LASTING)
    assert tracker.lasting[0, 0, column] == pytest.approx(fade**2 + fade)
    assert tracker.recent[:, 1].sum() == 0


def test_of_a_layer_that_was_long_not_seen_what_all_texts_told_is_recalled_and_no_more():
    tracker = Tracker(4)
    for layer, hit in ((1, False), (3, True)):
        tracker.add(layer, [hit] * 60, [0.9] * 60)
    tracker.add(2, [True] * 3, [0.9] * 3)
    tracker.estimates()
    assert tracker.lasting.sum((0, 2)) == pytest.approx([60, 3, 60]), "nothing counts twice"
    tracker.pass_time(20 * LASTING)
    assert tracker.num_lasting(1) < 0.001
    right, _ = tracker.estimates()
    assert tracker.lasting.sum((0, 2)) == pytest.approx([RECALLED, 3 * 2 ** (-20 * LASTING / OVERALL), RECALLED])
    assert (tracker.lasting[1, 0] > 0).sum() == 1 and tracker.lasting[0, 0].sum() == 0, "as they were"
    column, (unknown, _) = confidence_bin(0.9), Tracker(4).estimates()
    assert right[0, column] < unknown[0, column] - 0.2 and right[2, column] > unknown[2, column]


def test_a_shadow_counts_for_every_layer_it_saw():
    tracker = Tracker(4)
    hits, sure = np.array([[True, False], [True, True]]), np.array([[0.1, 0.9], [0.6, 0.999]], np.float32)
    tracker.add_shadow(Shadow((1, 3), hits, sure))
    tracker.estimates()
    assert tracker.recent[0, 0, confidence_bin(0.1)] == tracker.recent[1, 0, confidence_bin(0.9)] == 1
    assert tracker.recent[0, 2, confidence_bin(0.6)] == tracker.recent[0, 2, confidence_bin(0.999)] == 1
    assert tracker.recent[:, 1].sum() == 0


@given(st.integers(0, 6), st.lists(st.floats(0, 1, width=32), max_size=6), st.integers(1, 3))
def test_of_a_draft_the_first_tokens_are_hits_and_the_others_misses(right, sure, layer):
    of_draft, one_by_one = Tracker(4), Tracker(4)
    of_draft.add_draft(layer, right, tuple(sure))
    one_by_one.add(layer, [n < right for n in range(len(sure))], sure)
    for name in ("recent", "lasting", "overall"):
        np.testing.assert_array_equal(getattr(of_draft, name), getattr(one_by_one, name))


def test_what_waits_counts_for_who_asks_how_many_there_are():
    tracker = Tracker(3)
    tracker.add_draft(2, 3, (0.9, 0.8, 0.7, 0.6))
    assert tracker.num_lasting(2) == 4 and tracker.num_lasting(1) == 0
    tracker.add(1, [True], [0.5])
    assert tracker.num_lasting(1) == 1
    tracker.add_draft(1, 0, ())
    assert not tracker._drafts_at, "of no tokens nothing waits"


@pytest.mark.parametrize("broken", ["_cells", "_cells_at", "_drafts", "_drafts_at", "_sure"])
@pytest.mark.parametrize("grows", [True, False])
def test_whatever_is_interrupted_who_counts_finds_all_that_waits(broken, grows):
    """As many single observations are read as there are `_cells`, and drafts as `_drafts_at`."""

    class Interrupted(Exception):
        pass

    class Array(array):
        def extend(self, given):
            raise Interrupted

        append = extend

        def __delitem__(self, at):
            raise Interrupted

    tracker = Tracker(4)
    tracker.add(1, [True], [0.5])
    tracker.add_draft(2, 1, (0.9, 0.1))
    held = getattr(tracker, broken)
    setattr(tracker, broken, Array(held.typecode, held))
    tracker.pass_time(3)
    with pytest.raises(Interrupted):
        (tracker.add(1, [True], [0.5]), tracker.add_draft(2, 1, (0.9,))) if grows else tracker.overall
    assert len(tracker._cells) <= len(tracker._cells_at)
    assert 3 * len(tracker._drafts_at) <= len(tracker._drafts)
    assert sum(tracker._drafts[1 : 3 * len(tracker._drafts_at) : 3]) <= len(tracker._sure)
    setattr(tracker, broken, array(held.typecode, getattr(tracker, broken)))
    assert is_prior(tracker.state(), 4) and not tracker._drafts_at and not tracker._cells


@pytest.mark.parametrize("in_drafts", [False, True])
def test_what_waits_to_be_counted_is_bounded(in_drafts):
    tracker = Tracker(3)
    for _ in range(2 * MOST_WAITING // 8):
        if in_drafts:
            tracker.add_draft(1, 8, (0.9,) * 8)
        else:
            tracker.add(1, [True] * 8, [0.9] * 8)
        tracker.pass_time(1)
        assert len(tracker._cells) + len(tracker._sure) <= MOST_WAITING
    counted = sum(2 ** (-n / OVERALL) for n in range(1, 2 * MOST_WAITING // 8 + 1))
    assert tracker.overall.sum() == pytest.approx(8 * counted)


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


def test_what_was_seen_at_one_confidence_tells_of_others():
    tracker = Tracker(3)
    for _ in range(12):
        tracker.add(1, [False] * 5, [0.7] * 5)
        right, _ = tracker.estimates()
    assert right[0, confidence_bin(0.9)] < 0.5 < right[1, confidence_bin(0.9)]


def test_mean_confidences_of_hits_and_misses():
    tracker = Tracker(3)
    tracker.add(2, [True, True, False], [0.99, 0.96, 0.4])
    hit, miss = tracker.mean_confidences(2)
    assert 0.95 < hit < 0.99 and 0.35 <= miss <= 0.5


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_estimates_are_probabilities_that_rise_with_confidence(data):
    layers = data.draw(st.integers(2, 6))
    tracker = Tracker(layers)
    for _ in range(data.draw(st.integers(0, 25))):
        count = data.draw(st.integers(0, 6))
        hits = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        sure = data.draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
        tracker.add(data.draw(st.integers(1, layers - 1)), hits, sure)
        tracker.pass_time(data.draw(st.integers(0, 100_000)))
        if data.draw(st.booleans()):
            tracker.estimates()
    right, share = tracker.estimates()
    assert ((right > 0) & (right < 1)).all() and (np.diff(right, axis=1) >= 0).all()
    assert (share >= 0).all()
    np.testing.assert_allclose(share.sum(1), 1)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_is_counted_late_is_what_is_counted_at_once(data):
    late, at_once = Tracker(4), Tracker(4)
    for _ in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(0, 4))
        hits = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
        sure = data.draw(st.lists(st.floats(0, 1, width=32), min_size=count, max_size=count))
        layer, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 40))
        layers = data.draw(st.sampled_from([(1, 2), (1, 2, 3)]))
        shadow = Shadow(layers, np.array([hits] * len(layers), bool), np.array([sure] * len(layers), np.float32))
        for tracker in (late, at_once):
            tracker.add(layer, hits, sure)
            tracker.add_shadow(shadow)
            tracker.pass_time(tokens)
        at_once.mean_confidences(1)  # asking counts
    late.mean_confidences(1)
    np.testing.assert_allclose(late.recent, at_once.recent, atol=1e-9)
    np.testing.assert_allclose(late.lasting, at_once.lasting, atol=1e-9)


def test_a_tracker_starts_from_an_earlier_ones_state():
    first = Tracker(4)
    for i in range(200):
        first.add(2, [i % 4 != 0], [0.8])
        first.pass_time(1)
        first.estimates()
    again = Tracker(4, first.state())
    column = confidence_bin(0.8)
    assert again.estimates()[0][1, column] == pytest.approx(0.75, abs=0.08)
    assert again.lasting.sum() <= 150.01  # thinned: what is seen now soon counts for more


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
    ],
)
def test_a_state_of_something_else_is_refused(given_):
    assert not is_prior(given_, 4)
    with pytest.raises(ValueError, match="not a prior"):
        read_prior(given_, 4)


def test_a_state_remembers_more_texts_than_the_last_and_a_prior_still_counts_for_little():
    tracker = Tracker(4)
    tracker.add(1, [True] * 400, [0.9] * 400)
    tracker.pass_time(OVERALL)
    tracker.add(1, [False] * 20, [0.9] * 20)
    state, column = tracker.state(), confidence_bin(0.9)
    assert state["hits"][0][column] == pytest.approx(200) and state["misses"][0][column] == pytest.approx(20)
    assert tracker.lasting[0, 0, column] < 0.01  # the text at hand has nothing of it left
    again = Tracker(4, state)
    assert again.lasting.sum() == pytest.approx(PRIOR_SIZE)
    assert again.lasting[0, 0, column] == pytest.approx(PRIOR_SIZE * 200 / 220)
    again.add(1, [True], [0.9])
    assert again.state()["hits"][0][column] == pytest.approx(201)


@pytest.mark.parametrize("curve", [None, 3, [[1.0, 2.0]], [["x"] * 3] * 2, [[1e6] * 3] * 2, [[float("nan")] * 3] * 2])
def test_curves_that_a_state_tells_are_where_fits_begin_if_they_are_curves(curve):
    tracker = Tracker(4)
    for layer in (1, 2, 3):
        tracker.add(layer, [True, layer > 1, False] * 60, [0.9, 0.6, 0.3] * 60)
    for _ in range(12):
        tracker.estimates()
    state = tracker.state()
    anew, from_curve = Tracker(4, {**state, "curve": curve}), Tracker(4, state)
    assert np.allclose(from_curve.estimates()[0], anew.estimates()[0], atol=0.01)
    far = {**state, "curve": [[-5.0] * 3, [1.0] * 3]}
    assert not np.allclose(Tracker(4, far).estimates()[0], anew.estimates()[0], atol=0.01)  # it does begin there


def test_what_is_saved_again_and_again_does_not_grow_for_ever():
    state = {"edges": list(CONFIDENCE_EDGES), "hits": [[1e9] * NUM_BINS] * 3, "misses": [[0.0] * NUM_BINS] * 3}
    assert sum(Tracker(4, state).state()["hits"][0]) == pytest.approx(OVERALL_SIZE)


def test_curves_are_fitted_before_they_are_written_whoever_asked_for_estimates():
    tracker = Tracker(4)
    for layer in (1, 2, 3):
        tracker.add(layer, [True] * 30 + [False] * 10 * layer, [0.9] * 30 + [0.3] * 10 * layer)
    prior = {name: told for name, told in tracker.state().items() if name != "curve"}
    asked, unasked = Tracker(4, prior), Tracker(4, prior)
    asked.estimates()
    assert unasked.state()["curve"] == asked.state()["curve"] != Tracker(4).state()["curve"]
