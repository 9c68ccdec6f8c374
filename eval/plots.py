"""Plots as small SVG files that are the same, byte for byte, for the same figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "selfspec",
    "svg.fonttype": "none",  # text stays text: small, and searchable
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
QUIET, LOUD, PLAIN = "#9db4c8", "#d1603d", "#555555"
DEFAULT_POLICY = "adaptive"
LINES = {"best static (E, D, stop)": "--", "clairvoyant without lookup": "-.", "clairvoyant": ":"}  # bounds shown


def check_plots() -> None:
    """ValueError where matplotlib is missing; call it before what is to be plotted is measured."""
    if find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib; install it, or leave out --output")


@contextmanager
def figure(path: Path, columns: int, size: tuple[float, float], **shared: Any) -> Iterator[Sequence[Any]]:
    """Axes in a row, written to `path` at the end."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        drawn = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(drawn)
        yield list(drawn.subplots(1, columns, squeeze=False, **shared)[0])
        drawn.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def plot_policies(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Speedup of every policy by task, as bars, beside the bounds, as lines."""
    rows = [row for row in found if row["kind"] == "policy"]
    bounds = {row["name"]: row for row in found if row["kind"] == "bound"}
    columns = list(rows[0]["speedup"])
    columns += ["mean"] if len(columns) > 1 else []
    with figure(path, len(columns), (1.2 + 2.6 * len(columns), 1.3 + 0.24 * len(rows)), sharey=True) as panels:
        for column, axes in zip(columns, panels, strict=True):
            bars = [_value(row, column) for row in rows]
            colours = [LOUD if row["name"] == DEFAULT_POLICY else QUIET for row in rows]
            axes.barh(range(len(rows)), bars, color=colours, height=0.7)
            for i, value in enumerate(bars):
                axes.text(0, i, f" {value:.2f}", va="center", fontsize=8)  # where no line of a bound crosses it
            for name, style in LINES.items():
                axes.axvline(_value(bounds[name], column), color=PLAIN, linestyle=style, linewidth=1.2, label=name)
            axes.set_title(column, loc="left")
            axes.set_xlim(0, 1.08 * max(*bars, *(_value(row, column) for row in bounds.values())))
            axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
            axes.tick_params(axis="y", length=0)
        panels[0].invert_yaxis()
        whole, lines = panels[0].figure, panels[0].get_legend_handles_labels()
        whole.supxlabel("speedup over plain decoding", fontsize=10)
        whole.legend(*lines, loc="outside upper right", ncols=3, frameon=False)


def _value(row: Mapping[str, Any], column: str) -> float:
    return float(row["mean"] if column == "mean" else row["speedup"][column])


def plot_live(tasks: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Live speedup by batch size of adaptive and of the best fixed setting, a panel per task; bars: 95 % intervals."""
    with figure(path, len(tasks), (1.2 + 4.2 * len(tasks), 3.4), sharey=True) as panels:
        for task, axes in zip(tasks, panels, strict=True):
            sizes = [batch["batch_size"] for batch in task["batches"]]
            for name, colour, mark in ((DEFAULT_POLICY, LOUD, "o"), ("best_fixed", QUIET, "s")):
                live = [next(m for m in b["methods"] if m["method"] == b[name])["live"] for b in task["batches"]]
                middle = [spread["median"] for spread in live]
                around = [[s["median"] - s["ci_low"] for s in live], [s["ci_high"] - s["median"] for s in live]]
                shape = {"color": colour, "markersize": 4, "capsize": 2, "elinewidth": 1}
                axes.errorbar(sizes, middle, around, fmt=mark + "-", label=name.replace("_", " "), **shape)
            axes.axhline(1, color=PLAIN, linestyle="--", linewidth=1.2, label="plain")
            axes.set_title(task["name"], loc="left")
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.set_xlabel("rows decoded together")
        panels[0].set_ylim(bottom=0)
        panels[0].set_ylabel("live speedup over plain decoding")
        panels[0].legend(frameon=False)
