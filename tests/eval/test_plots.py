"""Plots are small, the same every time, and show what they are given; made-up machines and traces are what they say."""

from __future__ import annotations

import builtins
from xml.etree import ElementTree

import numpy as np
import pytest

from eval import knee, plots
from eval.compare import BOUNDS
from eval.replay import make
from selfspec.control.fixed import Fixed, Plain
from selfspec.control.plan import Plan, Policy


def section(names=("plain", "fixed", "adaptive")):
    speedups = {name: {"code": 1 + i / 3, "stories": 1 + i / 9} for i, name in enumerate((*names, *BOUNDS))}
    kinds = {name: ("bound", None) if name in BOUNDS else ("policy", "fresh") for name in speedups}
    return {
        "length": 512,
        "rows": [
            {"name": name, "kind": kinds[name][0], "start": kinds[name][1], "speedup": s, "mean": sum(s.values()) / 2}
            for name, s in speedups.items()
        ],
    }


def texts(path):
    return [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_the_policies_plot_is_small_and_the_same_twice_and_names_all(tmp_path):
    for name in ("one.svg", "two.svg"):
        plots.plot_policies(section(), tmp_path / name)
    one = (tmp_path / "one.svg").read_bytes()
    assert one == (tmp_path / "two.svg").read_bytes()
    assert len(one) < 60_000
    shown = texts(tmp_path / "one.svg")
    assert {"plain", "fixed", "adaptive", "code", "stories", "mean", *BOUNDS[1:]} <= set(shown)
    assert "1.67" in [text.strip() for text in shown]
    assert b"Date" not in one and b"date" not in one


def test_the_knee_plot_is_small_and_the_same_twice(tmp_path):
    lines = {"synergy": {1: 5.0, 8: 3.0, 512: 0.0}, "adaptive": {1: 6.0, 8: 4.0, 512: 0.0}}
    for name in ("one.svg", "two.svg"):
        plots.plot_knee(lines, tmp_path / name)
    one = (tmp_path / "one.svg").read_bytes()
    assert one == (tmp_path / "two.svg").read_bytes()
    assert len(one) < 60_000
    assert {"synergy", "adaptive", "512"} <= set(texts(tmp_path / "one.svg"))


def test_without_matplotlib_a_run_that_draws_is_refused_before_it_begins(monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="plots need matplotlib"):
        plots.check_plots()


def test_the_command_imports_matplotlib_only_to_draw(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        assert not name.startswith("matplotlib")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    plots.check_plots()
    knee.shown_policies()


def test_costs_are_flat_up_to_the_knee_and_linear_beyond_it():
    costs = knee.knee_costs()
    assert costs.num_layers == 32
    assert costs.plain_round(160) == pytest.approx(costs.plain_round(1), rel=0.05)
    one = costs.verify(8, 1, 1)
    assert costs.verify(8, 16, 160) == pytest.approx(one) == costs.verify(8, 1, 18)
    assert costs.verify(8, 330, 330) == pytest.approx(2 * one, rel=0.02)
    assert costs.verify(8, 100, 500) == pytest.approx(500 / 165 * one, rel=0.02)
    assert costs.early_pass(8, 495) == pytest.approx(3 * costs.early_pass(8, 1))
    assert costs.head(330) == pytest.approx(2 * costs.head(165)) == pytest.approx(2 * costs.head(1))


def test_made_up_traces_hit_as_often_as_they_say_and_are_calibrated():
    traces = knee.made_up_traces(32, count=16, num_tokens=256)
    hits, sure = (np.concatenate([getattr(trace, name) for trace in traces], 1) for name in ("hits", "confidences"))
    for layer, rate in ((4, 0.6), (6, 0.75), (8, 0.85)):
        assert hits[layer - 1].mean() == pytest.approx(rate, abs=0.03)
        for low in (0.2, 0.5, 0.8):
            members = (sure[layer - 1] >= low) & (sure[layer - 1] < low + 0.2)
            assert hits[layer - 1][members].mean() == pytest.approx(sure[layer - 1][members].mean(), abs=0.1)
    assert (hits[1:] >= hits[:-1]).all()  # deeper layers are right wherever shallower ones are
    assert np.isnan(traces[0].wrong[traces[0].hits]).all() and not np.isnan(traces[0].wrong[~traces[0].hits]).any()


class ByBatch(Policy):
    """Drafts less the more rows there are, and not at all beyond ten."""

    def plan(self, rows):
        length = 6 // len(rows)
        return Plan(4 if length else None, tuple(min(length, row.room - 1) for row in rows))


def test_the_sweep_tells_the_lengths_that_a_policy_settles_on():
    made = {"by batch": lambda costs: ByBatch(), "plain": lambda costs: Plain(), "fixed": lambda costs: Fixed(4, 2)}
    lengths = knee.sweep(made, knee.knee_costs(16, most_rows=16), batch_sizes=(1, 3, 12))
    assert lengths["plain"] == {1: 0, 3: 0, 12: 0}
    assert lengths["fixed"] == pytest.approx({1: 2, 3: 2, 12: 2}, abs=0.1)
    assert lengths["by batch"] == pytest.approx({1: 6, 3: 2, 12: 0}, abs=0.3)


@pytest.mark.parametrize("name", list(knee.shown_policies()))
def test_speculation_shrinks_as_the_batch_grows_past_the_knee(name):
    costs = knee.knee_costs()
    lengths = knee.sweep({name: lambda costs: make(name, costs)}, costs, batch_sizes=(1, 512))[name]
    assert lengths[512] < lengths[1]
