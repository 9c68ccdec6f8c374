"""The losses of a run as a plot, for its model card."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HALF_LIFE = 5  # logged entries after which one counts half in a smoothed curve
STYLE: dict[Any, Any] = {"svg.hashsalt": "selfspec", "svg.fonttype": "none", "font.size": 10}


def smoothed(values: Sequence[float], half_life: float = HALF_LIFE) -> list[float]:
    """Decayed means of a curve up to each of its points, the first of which is its own."""
    keep, total, weight, out = 0.5 ** (1 / half_life), 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def shown_exits(num_layers: int) -> list[int]:
    """A few exits that tell of all: the first, an eighth, a quarter, a half, the last."""
    return sorted({1, *(max(1, num_layers * eighths // 8) for eighths in (1, 2, 4)), num_layers})


def draw_curves(history: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw the smoothed loss of a few exits over the steps as SVG; False, and nothing drawn, without matplotlib."""
    exits = sorted({int(key.removeprefix("loss_exit_")) for entry in history for key in entry if "loss_exit_" in key})
    if find_spec("matplotlib") is None or not exits:
        return False
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(7.0, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for number in [each for each in shown_exits(exits[-1]) if each in exits]:
            points = [(e["step"], e[f"loss_exit_{number}"]) for e in history if f"loss_exit_{number}" in e]
            steps, losses = zip(*points, strict=True)
            name = f"exit {number}" if number < exits[-1] else "whole model"
            axes.plot(steps, smoothed(losses), label=name)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss, nats per token")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return True
