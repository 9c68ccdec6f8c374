"""Plots are small and reproducible, and name their content."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from eval import figures
from eval.policies import BOUNDS


def rows():
    """Results of replay for three policies and the bounds."""
    names = ("plain", "fixed", "adaptive", *BOUNDS)
    speedups = {name: {"code": 1 + i / 3, "stories": 1 + i / 9} for i, name in enumerate(names)}
    return [
        {"name": n, "kind": "bound" if n in BOUNDS else "policy", "speedup": s, "mean": sum(s.values()) / 2}
        for n, s in speedups.items()
    ]


@pytest.mark.parametrize(
    ("plot", "given", "shown"),
    [
        (figures.plot_policies, rows(), {"plain", "fixed", "adaptive", "code", "stories", "mean", "1.67", *BOUNDS[1:]}),
    ],
)
def test_plots_are_small_and_reproducible_and_name_their_content(plot, given, shown, tmp_path):
    for name in ("one.svg", "two.svg"):
        plot(given, tmp_path / name)
    one = (tmp_path / "one.svg").read_bytes()
    assert one == (tmp_path / "two.svg").read_bytes() and len(one) < 60_000 and b"Date" not in one
    texts = {e.text.strip() for e in ElementTree.parse(tmp_path / "one.svg").iter("{http://www.w3.org/2000/svg}text")}
    assert shown <= texts


def test_a_plot_without_matplotlib_is_refused(monkeypatch):
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="plots need matplotlib"):
        figures.check_plots()
