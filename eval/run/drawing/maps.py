"""Figures with a number in every cell: acceptance and speed by exit layer; and where rounds spend their time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import exp, log
from typing import Any

from eval.run.drawing.paper import STRONG, WIDTH, Sketch, counted, ink, is_ours, legend, legend_height, number, span

Cells = Sequence[Sequence[float | None]]
ROW = 0.26  # inches
MISSING = "#e6e8ea"
LEAST_SPREAD = log(1.1)  # speeds closer to plain decoding than this are not made to look far from it
STAGES = (STRONG[1], STRONG[5], STRONG[2], STRONG[3], STRONG[4], STRONG[0], "#f0e442", "#8c8c8c")


def acceptance(study: Mapping[str, Any]) -> Sketch | None:
    """Joint acceptance by exit layer and position in the draft."""
    exits = [each for each in study["exits"] if each["joint"]]
    cells = [[number(value) for value in each["joint"]] for each in exits]
    if not any(value is not None for row in cells for value in row):
        return None
    width = max(map(len, cells))
    cells = [row + [None] * (width - len(row)) for row in cells]
    layers = study.get("num_layers")
    caption = (
        "How often a draft is the whole model's own up to and including a position (joint acceptance), by the layer "
        f"that it leaves at{f', of {layers} layers' if layers else ''}.{counted(study)}"
    )
    rows = [str(each["exit_layer"]) for each in exits]
    paint = partial(_acceptance, cells, rows, [str(i + 1) for i in range(width)])
    return Sketch("Acceptance by exit layer and position", (caption,), 0.7 + ROW * len(rows), paint)


def _acceptance(cells: Cells, rows: Sequence[str], columns: Sequence[str], axes: Any) -> None:
    from matplotlib import colormaps

    _map(axes, cells, rows, columns, colormaps["cividis"], "{:.2f}")
    axes.set_xlabel("position in the draft")


def grid(study: Mapping[str, Any]) -> Sketch | None:
    """Tokens per second by exit layer and draft length, with the best and the one that was predicted to be."""
    cells = [[number(value) for value in row] for row in study["tokens_per_second"]]
    known = [value for row in cells for value in row if value is not None]
    if not known:
        return None
    plain = number(study.get("plain_tokens_per_second"))
    beside = f"; plain decoding: {_speed(plain)}. Purple is faster than that, orange slower" if plain else ""
    caption = f"Tokens per second by exit layer and draft length{beside}.{counted(study)}"
    marks = _marks(study)
    heads = [label for label, *_ in marks]
    height = 0.7 + ROW * len(cells) + (legend_height(heads) if heads else 0)
    paint = partial(_grid, cells, study["exit_layers"], study["draft_lengths"], plain or min(known), marks)
    return Sketch("Speed by exit layer and draft length", (caption,), height, paint)


def _marks(study: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Label, exit layer and draft length of the best cells."""
    found = []
    for key, words in (("best", "best"), ("predicted_best", "predicted")):
        each = study.get(key)
        if each:
            exit_layer, length = each["exit_layer"], each["draft_length"]
            speedup, foretold = (number(each.get(name)) for name in ("speedup", "predicted_speedup"))
            told = f", {foretold:.2f}x" if foretold is not None else ""
            if speedup is not None:
                told += f", measured {speedup:.2f}x" if told else f", {speedup:.2f}x"
            found.append((f"{words}: exit {exit_layer}, {length} drafted{told}", exit_layer, length))
    return found


def _grid(
    cells: Cells,
    exits: Sequence[int],
    lengths: Sequence[int],
    plain: float,
    marks: Sequence[tuple[str, int, int]],
    axes: Any,
) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    shade, logs = colormaps["PuOr"], [log(v / plain) for row in cells for v in row if v]
    low, high = max(LEAST_SPREAD, -min(logs)), max(LEAST_SPREAD, *logs)

    def colour(value: float) -> Any:
        far = log(max(value, plain * exp(-low)) / plain)
        return shade(0.5 + 0.3 * far / (high if far > 0 else low))

    _map(axes, cells, [str(e) for e in exits], [str(d) for d in lengths], colour, None)
    axes.set_xlabel("drafted tokens per round")
    handles, taken = [], set[tuple[int, int]]()
    for i, (_, exit_layer, length) in enumerate(marks):
        at = lengths.index(length), exits.index(exit_layer)
        x, y = (0.08, 0.14) if at in taken else (0.0, 0.0)  # inside the first, where both are one cell
        taken.add(at)
        place = ((at[0] - 0.5 + x, at[1] - 0.5 + y), 1 - 2 * x, 1 - 2 * y)
        shape: dict[str, Any] = {"fill": False, "clip_on": False, "zorder": 4 + i}
        axes.add_patch(Rectangle(*place, edgecolor="white", linewidth=4.2, **shape))
        shape |= {"linestyle": ("-", (0, (2, 1)))[i], "linewidth": 2.2, "edgecolor": "black"}
        handles.append(axes.add_patch(Rectangle(*place, **shape)))
    if handles:
        legend(axes, handles, [label for label, *_ in marks])


def _speed(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _map(
    axes: Any,
    cells: Cells,
    rows: Sequence[str],
    columns: Sequence[str],
    colour: Callable[[float], Any],
    form: str | None,
) -> None:
    """Cells with their numbers; `form` None is a speed's. The first row is at the top."""
    from matplotlib.patches import Rectangle

    shown = [["" if v is None else form.format(v) if form else _speed(v) for v in row] for row in cells]
    letters = max(len(text) for row in shown for text in row)
    size = min(10.5, 72 * 0.82 * WIDTH / len(columns) / (letters + 0.5) / 0.62)
    for i, (row, texts) in enumerate(zip(cells, shown, strict=True)):
        for j, (value, text) in enumerate(zip(row, texts, strict=True)):
            fill = MISSING if value is None else colour(value)
            axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=fill, edgecolor="white", linewidth=1))
            axes.text(j, i, text, ha="center", va="center_baseline", fontsize=size, color=ink(fill))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylabel("exit layer")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def stages(summary: Mapping[str, Any]) -> Sketch | None:
    """A bar of shares per method of ours."""
    found = {}
    for method in summary["methods"]:
        group = method["groups"].get("overall")
        if group and group["stage_shares"] and is_ours(method["method"]):
            found[method["method"]] = group
    if not found:
        return None
    shares = {name: group["stage_shares"] for name, group in found.items()}
    counts = span([group["num_questions"] for group in found.values()], "questions")
    tokens = span([group["num_tokens"] for group in found.values()], "new tokens")
    caption = f"Share of each stage in the time of our methods, by the engine's own clock. {counts} and {tokens} each."
    names = list(dict.fromkeys(stage for each in shares.values() for stage in each))
    height = 0.7 + 0.36 * len(shares) + legend_height(names)
    return Sketch("Time by stage", (caption,), height, partial(_stages, shares, names))


def _stages(shares: Mapping[str, Mapping[str, float]], names: Sequence[str], axes: Any) -> None:
    starts, handles = [0.0] * len(shares), []
    for number_of, stage in enumerate(names):
        colour = STAGES[number_of % len(STAGES)]
        values = [each.get(stage) or 0.0 for each in shares.values()]
        handles.append(axes.barh(range(len(values)), values, left=starts, color=colour, height=0.7))
        for i, (start, value) in enumerate(zip(starts, values, strict=True)):
            if value >= 0.09:
                middle = start + value / 2
                axes.text(middle, i, f"{value:.0%}", ha="center", va="center_baseline", color=ink(colour))
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    axes.set_yticks(range(len(shares)), list(shares))
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.tick_params(axis="y", length=0)
    legend(axes, handles, names)
