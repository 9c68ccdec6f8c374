"""The figure of a run: every method's speedup by category, with intervals, as an SVG."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from textwrap import fill, shorten
from typing import Any, NamedTuple

from eval.methods import parse_method

NAME = "speedup_by_category"
WIDTH = 5.0  # inches: on a phone, 340 pixels wide, letters of 10 points are as many pixels high
PITCH = 0.15  # inches between two methods of a category
LETTER = 0.092  # inches that a letter is wide, about
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "selfspec",  # the same bytes for the same figures
    "svg.fonttype": "none",  # text stays text: small, and searchable
    "text.parse_math": False,  # a name may hold dollars
    "font.size": 11,
    "legend.fontsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",  # a page may be dark
    "savefig.facecolor": "white",
}
# After Okabe and Ito: colour-blind eyes tell them apart too, and markers tell them apart without colour.
OURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
OTHERS = ("#5f6b76", "#98a4af", "#7d6e5d", "#b9aa93")
MARKERS = "osD^vPXp<>*"
Points = Mapping[tuple[str, str], tuple[float, float, float]]  # by method and group: value, low and high


class Figure(NamedTuple):
    title: str
    caption: str  # Markdown
    svg: str


def speedup_by_category(summary: Mapping[str, Any]) -> Figure | None:
    """Every method but the baseline, by category and overall; None where there is nothing to show.

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
    return Figure("Speedup by category", caption, _drawn(points, str(base)))


def _drawn(points: Points, base: str) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    names = list(dict.fromkeys(name for _, name in points))
    methods = list(dict.fromkeys(method for method, _ in points))
    labels = [*(shorten(method, 54, placeholder="…") for method in methods), f"{base} = 1"]
    columns = max(1, min(len(labels), int(WIDTH / LETTER) // (max(map(len, labels)) + 6)))
    height = max(2.2, 0.8 + PITCH * (len(methods) + 1) * len(names) + 0.2 * -(-len(labels) // columns))
    with rc_context(STYLE):
        canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(canvas)
        axes = canvas.subplots()
        handles = _paint(axes, points, methods, names)
        canvas.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False)
        file = io.BytesIO()
        canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue().decode()


def _paint(axes: Any, points: Points, methods: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Draw everything; what the legend shows, the baseline's line last."""
    pitch, handles = len(methods) + 1, []
    for j in range(0, len(names), 2):
        axes.axhspan(j * pitch - 1, (j + 1) * pitch - 1, color="#f1f3f5", linewidth=0, zorder=0)
    for i, (method, colour) in enumerate(_colours(methods).items()):
        found = [(j * pitch + i, points[method, name]) for j, name in enumerate(names) if (method, name) in points]
        values = [value for _, (value, _, _) in found]
        around = [[max(0.0, v - low) for _, (v, low, _) in found], [max(0.0, high - v) for _, (v, _, high) in found]]
        look: dict[str, Any] = {"color": colour, "marker": MARKERS[i % len(MARKERS)], "markersize": 5, "capsize": 2}
        handles.append(axes.errorbar(values, [at for at, _ in found], xerr=around, linestyle="none", **look))
    handles.append(axes.axvline(1, color="#3d4349", linestyle="--", linewidth=1.2))
    axes.set_ylim(len(names) * pitch - 1, -1)
    words = [fill(name.replace("_", " "), 13) for name in names]
    axes.set_yticks([j * pitch + (pitch - 2) / 2 for j in range(len(names))], words)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("speedup")
    return handles


def _colours(methods: Iterable[str]) -> dict[str, str]:
    """Strong colours for our methods, quiet ones for the others; `adaptive` always has the first."""
    ours, others = list(OURS[1:]), list(OTHERS)
    found = {}
    for method in methods:
        if method == "adaptive":
            found[method] = OURS[0]
            continue
        colours = ours if _is_ours(method) else others
        colours.append(colours.pop(0))  # the next one the next time
        found[method] = colours[-1]
    return found


def _is_ours(method: str) -> bool:
    try:
        return parse_method(method).is_ours
    except ValueError:  # a name of somebody's answer file
        return False
