"""Tables as Markdown that is also aligned for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBER = re.compile(r"[-+*(]*\d")  # what a cell of figures starts with; it may be bold, or an interval


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. The first column and columns of words are flush left, columns of figures are flush right."""
    cells = [[_cell(text) for text in row] for row in (columns, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(columns))]
    is_left = [i == 0 or not all(NUMBER.match(row[i]) or not row[i] for row in cells[1:]) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.ljust(w) if left else cell.rjust(w) for cell, w, left in zip(row, widths, is_left, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if left else "-" * (w - 1) + ":" for w, left in zip(widths, is_left, strict=True)]
    return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])


def _cell(text: str) -> str:
    """A cell's text in one line, without what would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")
