"""What is written down of a run: its summary, and the reports and figures made of that and of its studies alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.run import drawing, report
from eval.run.lines import FullError, replace_bytes, replace_text
from eval.run.page import html, markdown


def write(folder: Path, summary: dict[str, Any]) -> str:
    """`summary.json`, `report.md`, `report.html` and `figures/`; the report's text.

    Raises:
        FullError: they cannot be written.
    """
    replace_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    drawn = drawing.draw_all(folder, summary)
    page = report.page(summary, drawn)
    text = _printable(markdown.render(page))
    replace_text(folder / "report.md", text)
    replace_text(folder / "report.html", _printable(html.render(page)))
    _write_figures(folder / "figures", drawn)
    return text


def _write_figures(folder: Path, drawn: drawing.Drawn) -> None:
    """Those that are drawn; of those that no longer are, nothing stays, unless nothing can be drawn here at all."""
    stale = [] if drawn.remark else [name for name in drawing.NAMES if name not in drawn.figures]
    try:
        for name in stale:
            for ending in ("svg", "png"):
                (folder / f"{name}.{ending}").unlink(missing_ok=True)
    except OSError as problem:
        raise FullError(f"cannot write {folder}: {problem.strerror or problem}") from problem
    for name, figure in drawn.figures.items():
        replace_text(folder / f"{name}.svg", _printable(figure.svg))
        replace_bytes(folder / f"{name}.png", figure.png)


def _printable(text: str) -> str:
    """Halves of letters, which JSON can hold, as question marks: no file of UTF-8 takes them."""
    return text.encode("utf-8", "replace").decode()
