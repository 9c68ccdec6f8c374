"""Tables as Markdown, and figures as SVG files that are the same, byte for byte, for the same numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from textwrap import fill, shorten
from typing import Any, NamedTuple

NAME = "speedup_by_category"
WIDTH = 5.0  # inches, the width of a run's figure: readable on a phone
PITCH = 0.15  # inches between two methods of a category
LETTER = 0.092  # approximate width of a letter in inches
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "selfspec",  # reproducible ids
    "svg.fonttype": "none",  # text stays text: small, and searchable
    "text.parse_math": False,  # a name may contain dollar signs
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",  # the page may be dark
    "savefig.facecolor": "white",
}
MARKERS = "osD^vPXp<>*"  # distinct without colour
NUMBER = re.compile(r"[-+*(]*\d")  # the start of a numeric cell; it may be bold, or an interval
Points = Mapping[tuple[str, str], tuple[float, float, float]]  # by method and group: value, low, high


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned for a terminal: the first column and text to the left, numbers to the right."""
    cells = [[" ".join(text.split()).replace("|", "\\|") for text in row] for row in (columns, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(columns))]
    is_left = [i == 0 or not all(NUMBER.match(row[i]) or not row[i] for row in cells[1:]) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.ljust(w) if left else cell.rjust(w) for cell, w, left in zip(row, widths, is_left, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if left else "-" * (w - 1) + ":" for w, left in zip(widths, is_left, strict=True)]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])


@contextmanager
def drawing(size: tuple[float, float], file: Any) -> Iterator[Any]:
    """A matplotlib figure of `size` inches; it is written as SVG to `file`, a path or binary file, at the end."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    with rc_context(STYLE):
        canvas = Canvas(figsize=size, layout="constrained")
        FigureCanvasSVG(canvas)
        yield canvas
        canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None})


class Figure(NamedTuple):
    """A figure of the report; the caption is Markdown."""

    title: str
    caption: str
    svg: str


def speedup_by_category(summary: Mapping[str, Any]) -> Figure | None:
    """Speedup of every method but the baseline, by category and overall; None where there is nothing to show.

    Raises:
        ImportError: matplotlib is not installed.
    """
    base, points, counts = summary["baseline"], dict[tuple[str, str], tuple[float, float, float]](), list[int]()
    for method in summary["methods"]:
        for name, group in method["groups"].items():
            found = group["speedup"]
            if found is not None and method["method"] != base and isfinite(found["value"]):
                points[method["method"], name] = (found["value"], found["low"], found["high"])
                counts.append(group["num_questions"])
    if not points:
        return None
    caption = (
        f"Tokens per second over those of `{base}`; whiskers are 95 % intervals over questions, "
        f"{max(counts)} of them per method."
    )
    return Figure("Speedup by category", caption, _draw_run(points, str(base)))


def _draw_run(points: Points, base: str) -> str:
    names = list(dict.fromkeys(name for _, name in points))
    methods = list(dict.fromkeys(method for method, _ in points))
    labels = [*(shorten(method, 54, placeholder="…") for method in methods), f"{base} = 1"]
    columns = max(1, min(len(labels), int(WIDTH / LETTER) // (max(map(len, labels)) + 6)))
    height = max(2.2, 0.8 + PITCH * (len(methods) + 1) * len(names) + 0.2 * -(-len(labels) // columns))
    file = io.BytesIO()
    with drawing((WIDTH, height), file) as canvas:
        handles = _draw_points(canvas.subplots(), points, methods, names)
        canvas.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False)
    return file.getvalue().decode()


def _draw_points(axes: Any, points: Points, methods: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Draw all points; returns the handles of the legend, the baseline's line last."""
    pitch, handles = len(methods) + 1, []
    for j in range(0, len(names), 2):
        axes.axhspan(j * pitch - 1, (j + 1) * pitch - 1, color="#f1f3f5", linewidth=0, zorder=0)
    for i, method in enumerate(methods):
        found = [(j * pitch + i, points[method, name]) for j, name in enumerate(names) if (method, name) in points]
        values = [value for _, (value, _, _) in found]
        errors = [[max(0.0, v - low) for _, (v, low, _) in found], [max(0.0, high - v) for _, (v, _, high) in found]]
        style: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "markersize": 5, "capsize": 2}
        handles.append(axes.errorbar(values, [at for at, _ in found], xerr=errors, linestyle="none", **style))
    handles.append(axes.axvline(1, color="#3d4349", linestyle="--", linewidth=1.2))
    axes.set_ylim(len(names) * pitch - 1, -1)
    words = [fill(name.replace("_", " "), 13) for name in names]
    axes.set_yticks([j * pitch + (pitch - 2) / 2 for j in range(len(names))], words)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("speedup")
    return handles
