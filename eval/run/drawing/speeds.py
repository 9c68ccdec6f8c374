"""Figures of speed: by category, by batch size, by policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from textwrap import fill
from typing import Any, NamedTuple

from eval.run.drawing.paper import (
    BAND,
    BAR,
    DEFAULT_POLICY,
    LINE,
    STRONG,
    Look,
    Sketch,
    counted,
    legend,
    legend_height,
    looks,
    number,
    shorten,
    span,
)
from eval.run.metrics import INTERVAL
from eval.run.page.blocks import Code

BOUNDS = ("best static (E, D, stop)", "clairvoyant")  # no policy can know them beforehand
PITCH = 0.15  # inches between two methods of a category
Cells = Mapping[tuple[str, str], "Range"]  # by method and group


class Range(NamedTuple):
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, found: Mapping[str, Any] | None, middle: str) -> Range | None:
        """A figure with its ends; those missing are the figure itself. None where there is no figure."""
        value = number(found[middle]) if found is not None else None
        if found is None or value is None:
            return None
        low, high = (number(found.get(end)) for end in ("low", "high"))
        return cls(value, value if low is None else low, value if high is None else high)


def speedup_by_category(summary: Mapping[str, Any]) -> Sketch | None:
    """Every method but the baseline, by category and overall."""
    base = summary["baseline"]
    methods = [method for method in summary["methods"] if method["method"] != base]
    cells: dict[tuple[str, str], Range] = {}
    for method in methods:
        for name, group in method["groups"].items():
            found = Range.of(group["speedup"], "value")
            if found is not None:
                cells[method["method"], name] = found
    if not cells:
        return None
    names = list(dict.fromkeys(name for _, name in cells))
    names = [name for name in names if name != "overall"] + ["overall"] * ("overall" in names)
    drawn = looks(dict.fromkeys(method for method, _ in cells))
    counts = [m["groups"]["overall"]["num_questions"] for m in methods if (m["method"], "overall") in cells]
    tokens = [m["groups"]["overall"]["num_tokens"] for m in methods if (m["method"], "overall") in cells]
    caption = (
        "Tokens per second over those of ",
        Code(base),
        f"; whiskers are {100 * INTERVAL:g} % intervals over questions. ",
        f"{span(counts, 'questions')} and {span(tokens, 'new tokens')} per method.",
    )
    rows = (len(drawn) + 1) * len(names)
    height = max(2.2, 0.7 + PITCH * rows + legend_height([*drawn, f"{base} = 1"]))
    return Sketch("Speedup by category", caption, height, partial(_by_category, cells, names, drawn, base))


def _by_category(cells: Cells, names: Sequence[str], drawn: Mapping[str, Look], base: str, axes: Any) -> None:
    pitch, handles = len(drawn) + 1, []
    for j in range(0, len(names), 2):
        axes.axhspan(j * pitch - 1, (j + 1) * pitch - 1, color=BAND, linewidth=0, zorder=0)
    for i, (method, (colour, mark)) in enumerate(drawn.items()):
        found = [(j * pitch + i, cells[method, name]) for j, name in enumerate(names) if (method, name) in cells]
        handles.append(_whiskers(axes, found, colour, mark))
    handles.append(axes.axvline(1, color=LINE, linestyle="--", linewidth=1.2))
    axes.set_ylim(len(names) * pitch - 1, -1)
    axes.set_yticks([j * pitch + (pitch - 2) / 2 for j in range(len(names))], [_wrapped(name) for name in names])
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name == "overall" else "normal")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("speedup")
    legend(axes, handles, [*drawn, f"{base} = 1"])


def _whiskers(axes: Any, found: Sequence[tuple[int, Range]], colour: str, mark: str) -> Any:
    values = [each.value for _, each in found]
    around = [[max(0.0, e.value - e.low) for _, e in found], [max(0.0, e.high - e.value) for _, e in found]]
    shape: dict[str, Any] = {"markersize": 5, "capsize": 2, "elinewidth": 1.3, "linestyle": "none"}
    return axes.errorbar(values, [at for at, _ in found], xerr=around, color=colour, marker=mark, **shape)


def _wrapped(name: str) -> str:
    return fill(shorten(name.replace("_", " "), 36), 13)


def batch(study: Mapping[str, Any]) -> Sketch | None:
    """A line per method over the batch size; ranges are those of the repeats."""
    sizes, lines = study["batch_sizes"], dict[str, list[tuple[int, Range]]]()
    for method in study["methods"]:
        by_size = zip(sizes, method["speedup"], strict=True)
        found = [(size, known) for size, each in by_size if (known := Range.of(each, "median")) is not None]
        if found:
            lines[method["method"]] = found
    if not lines:
        return None
    caption = "Speedup over plain decoding of the same batch: median, lowest and highest of the repeats."
    settings = {method["method"]: method["settings"] for method in study["methods"] if method.get("settings")}
    for name, each in settings.items():
        caption += f" The {name} ones (exit layer, drafted): {'; '.join(map(str, each))}."
    height = 2.7 + legend_height([*lines, "plain = 1"])
    return Sketch("Speedup by batch size", (caption + counted(study),), height, partial(_batch, sizes, lines))


def _batch(sizes: Sequence[int], lines: Mapping[str, Sequence[tuple[int, Range]]], axes: Any) -> None:
    drawn, handles = looks(lines, all_ours=True), []
    for name, found in lines.items():
        values = [each.value for _, each in found]
        around = [[max(0.0, e.value - e.low) for _, e in found], [max(0.0, e.high - e.value) for _, e in found]]
        shape: dict[str, Any] = {"color": drawn[name][0], "marker": drawn[name][1], "markersize": 5, "capsize": 3}
        handles.append(axes.errorbar([size for size, _ in found], values, around, linewidth=1.6, **shape))
    handles.append(axes.axhline(1, color=LINE, linestyle="--", linewidth=1.2))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows decoded together")
    axes.set_ylabel("speedup")
    legend(axes, handles, [*lines, "plain = 1"])


def policies(study: Mapping[str, Any]) -> Sketch | None:
    """A bar per policy, the fastest first, and a line per bound."""
    known = [(row["name"], row["kind"], number(row["speedup"])) for row in study["rows"]]
    bars = [(name, value) for name, kind, value in known if kind == "policy" and value is not None]
    lines = [(name, value) for name, kind, value in known if kind == "bound" and name in BOUNDS and value is not None]
    if not bars:
        return None
    bars.sort(key=lambda bar: -bar[1])
    caption = (
        "Speedup over plain decoding, replayed on recorded outputs at measured costs, beside what the best fixed "
        f"setting in hindsight and perfect foresight would reach.{counted(study)}"
    )
    height = 0.7 + 0.26 * len(bars) + (legend_height([name for name, _ in lines]) if lines else 0)
    return Sketch("Policies beside their bounds", (caption,), height, partial(_policies, bars, lines))


def _policies(bars: Sequence[tuple[str, float]], lines: Sequence[tuple[str, float]], axes: Any) -> None:
    colours = [STRONG[0] if name == DEFAULT_POLICY else BAR for name, _ in bars]
    axes.barh(range(len(bars)), [value for _, value in bars], color=colours, height=0.72)
    for i, (_, value) in enumerate(bars):
        axes.text(0, i, f" {value:.2f}", va="center")  # at the foot, where no line crosses it
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1.05 * max(value for _, value in [*bars, *lines]))
    axes.set_xlabel("speedup")
    styles = zip(lines, ("--", ":"), strict=False)
    handles = [axes.axvline(value, color=LINE, linestyle=style, linewidth=1.6) for (_, value), style in styles]
    if handles:
        legend(axes, handles, [f"{name}: {value:.2f}" for name, value in lines])
