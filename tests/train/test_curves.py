"""Curves of a run: smoothing that keeps what is constant, a picture that is the same each time, none without data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train import curves
from train.curves import draw_curves, shown_exits, smoothed

HISTORY = [
    {
        "step": step,
        "learning_rate": 0.1,
        "loss_exit_1": 8 - step / 10,
        "loss_exit_2": 7.5 - step / 10,
        "loss_exit_8": 4.0,
    }
    for step in range(0, 40, 4)
]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.floats(0.5, 20))
def test_smoothing_stays_between_the_values_so_far_and_begins_with_the_first(values, half_life):
    out = smoothed(values, half_life)
    assert len(out) == len(values) and out[0] == pytest.approx(values[0])
    for i, value in enumerate(out):
        assert min(values[: i + 1]) - 1e-9 <= value <= max(values[: i + 1]) + 1e-9


def test_after_a_half_life_a_value_counts_half():
    assert smoothed([1.0, 0.0], half_life=1) == [1.0, pytest.approx(1 / 3)]


@given(st.integers(2, 80))
def test_the_exits_shown_are_few_rise_and_end_with_the_whole_model(num_layers):
    exits = shown_exits(num_layers)
    assert exits == sorted(set(exits)) and exits[0] == 1 and exits[-1] == num_layers and len(exits) <= 5


def test_the_picture_is_the_same_each_time_and_names_its_lines(tmp_path):
    assert draw_curves(HISTORY, tmp_path / "a.svg") and draw_curves(HISTORY, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert all(name in text for name in ("exit 1", "exit 2", "whole model", "nats per token"))


def test_without_losses_or_matplotlib_nothing_is_drawn(tmp_path, monkeypatch):
    assert not draw_curves([{"step": 1, "learning_rate": 0.1}], tmp_path / "a.svg")
    monkeypatch.setattr(curves, "find_spec", lambda name: None)
    assert not draw_curves(HISTORY, tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()
