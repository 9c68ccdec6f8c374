"""What all figures of a run share: paper, colours and letters, and files that are the same for the same data."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from eval.run.names import parse_method
from eval.run.page.blocks import Text

WIDTH = 5.0  # inches: on a phone, 340 pixels wide, letters of 10 points are as many pixels high
DPI = 200  # of the PNG
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "selfspec",
    "svg.fonttype": "none",  # text stays text: small, and searchable
    "text.parse_math": False,  # a name may hold dollars
    "font.size": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "legend.fontsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",  # a page may be dark
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
}
# After Okabe and Ito: told apart by colour-blind eyes too; markers tell them apart without colour.
STRONG = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
QUIET = ("#5f6b76", "#98a4af", "#7d6e5d", "#b9aa93")
MARKERS = "osD^vPXp<>*"
BAR, LINE, BAND = "#9db4c8", "#3d4349", "#f1f3f5"
DEFAULT_POLICY = "adaptive"
LETTER = 0.092  # inches that a letter is wide, about
Look = tuple[str, str]  # colour and marker


@dataclass(frozen=True)
class Sketch:
    """A figure that is still to be drawn.

    Args:
        caption: what is shown, and of how many questions or tokens.
        height: inches.
        paint: draws on the axes that it is given.
    """

    title: str
    caption: Text
    height: float
    paint: Callable[[Any], None]


@dataclass(frozen=True)
class Drawing:
    """A figure, as two files of the same content."""

    name: str
    title: str
    caption: Text
    svg: str
    png: bytes


def draw(name: str, sketch: Sketch) -> Drawing:
    """Needs matplotlib; equal data give equal bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    vector, pixels = io.BytesIO(), io.BytesIO()
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a letter that the PNG's font lacks; the SVG has it as text
        figure = Figure(figsize=(WIDTH, sketch.height), layout="constrained")
        FigureCanvasAgg(figure)
        sketch.paint(figure.subplots())
        figure.savefig(vector, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(pixels, format="png", dpi=DPI, metadata={"Software": None})
    return Drawing(name, sketch.title, sketch.caption, vector.getvalue().decode(), pixels.getvalue())


def looks(methods: Iterable[str], all_ours: bool = False) -> dict[str, Look]:
    """Colour and marker of every method: strong ones for ours, the default policy's first."""
    methods = list(methods)
    ours = sorted((name for name in methods if all_ours or is_ours(name)), key=lambda name: name != DEFAULT_POLICY)
    strong = STRONG if DEFAULT_POLICY in ours else STRONG[1:]
    colours = {name: strong[i % len(strong)] for i, name in enumerate(ours)}
    others = [name for name in methods if name not in colours]
    colours |= {name: QUIET[i % len(QUIET)] for i, name in enumerate(others)}
    return {name: (colours[name], MARKERS[i % len(MARKERS)]) for i, name in enumerate(methods)}


def is_ours(name: str) -> bool:
    try:
        return parse_method(name).is_ours
    except ValueError:
        return False


def legend(axes: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Above the axes, in as many columns as there is room for."""
    columns, labels = _columns(labels), [shorten(label) for label in labels]
    axes.figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, borderaxespad=0.2)


def legend_height(labels: Sequence[str]) -> float:
    """Inches that `legend` takes."""
    return 0.2 * -(-len(labels) // _columns(labels)) + 0.1


def _columns(labels: Sequence[str]) -> int:
    fit = int(WIDTH / LETTER) // (max(len(shorten(label)) for label in labels) + 6)  # the mark takes some letters' room
    return max(1, min(fit, len(labels)))


def shorten(name: str, most: int = 54) -> str:
    """A name that fits the paper."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def ink(colour: Any) -> str:
    """Black or white, whichever stands out more from a colour (WCAG's contrast)."""
    from matplotlib.colors import to_rgb

    parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
    return "black" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "white"


def number(value: Any) -> float | None:
    """A figure of a study or summary as a number; None where it is missing or not finite."""
    return float(value) if value is not None and isfinite(value) else None


def span(counts: Iterable[int], of: str) -> str:
    """The counts of several methods in words: `48 questions`, `3 to 48 questions`."""
    counts = sorted(counts)
    least, most = f"{counts[0]:,}", f"{counts[-1]:,}"
    return f"{most if least == most else f'{least} to {most}'} {of if counts[-1] != 1 else of.removesuffix('s')}"


def counted(study: Mapping[str, Any]) -> str:
    """How many questions and tokens a study is made of, as a sentence after a blank; empty where it does not tell."""
    told = [
        words.format(span([count], of))
        for key, of, words in (
            ("num_questions", "questions", "{}"),
            ("num_tokens", "tokens", "{}"),
            ("tokens", "new tokens", "up to {} each"),
            ("length", "new tokens", "up to {} each"),
        )
        if isinstance(count := study.get(key), int)
    ]
    text = ", ".join(told)
    return f" {text[0].upper()}{text[1:]}." if told else ""
