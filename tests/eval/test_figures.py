"""What plots need."""

from __future__ import annotations

import pytest

from eval import figures


def test_a_plot_without_matplotlib_is_refused(monkeypatch):
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="plots need matplotlib"):
        figures.check_plots()
