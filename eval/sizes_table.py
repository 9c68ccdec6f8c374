"""The tables of `python -m eval sizes`: loading, and speed, beside a peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from eval.figures import table

OURS, LLAMA_CPP, TRANSFORMERS = "selfspec", "llama.cpp", "transformers"
GB, MB = 1e9, 1e6
LOADING = (
    *("file", "engine", "file GB", "first load s", "second load s", "resident GB", "over the file MB", "peak GB"),
    "written MB",
)
SPEED = ("file", "threads", "decode tokens/s", "peer", "ratio", "share of GB/s", "prompt tokens/s", "peer", "ratio")
CONTEXTS = ("file", "threads", "context", "tokens/s", "share of GB/s")
Row = Mapping[str, Any]


class Cell(NamedTuple):
    """One measurement. `task` is one of `eval.sizes_child`'s; loading is "first" and "second"."""

    file: str
    engine: str  # empty: none
    task: str
    threads: int


def cell_of(row: Row) -> Cell:
    """The measurement of a row of the run folder."""
    return Cell(*(row[name] for name in Cell._fields))


def render(rows: Sequence[Row], machine: Mapping[str, Any]) -> str:
    """The tables of what was measured, and why the rest was not."""
    found = {cell_of(row): row for row in rows if "found" in row}
    failed = {cell_of(row): row for row in rows if "failed" in row and cell_of(row) not in found}
    bare = [row["found"]["resident"] / MB for cell, row in found.items() if cell.task == "imports"]
    parts = [
        f"{machine['cpu']}, {machine['cpu_cores']} cores, torch {machine['torch']}, selfspec at {machine['commit']}; "
        "random weights. Loading: seconds from the start of the process to the first token, files in the page cache. "
        "Resident: after the first token, mapped pages counted, less that of a process that only imports torch "
        f"({max(bare, default=0):.0f} MB); of llama.cpp nothing is subtracted. Speed: median and range of the repeats, "
        "and the peer's median. Share: bytes of weights that a token reads, times tokens/s, over the bandwidth."
    ]
    parts.append(table(LOADING, [_loading(found, cell) for cell in found if cell.task == "second"]))
    widths = sorted(
        {int(width) for cell in found if cell.task == "verify" for width in found[cell]["found"]["seconds"]}
    )
    ours = [cell for cell in found if cell.task == "speed" and cell.engine == OURS]
    parts.append(
        table([*SPEED, *(f"{n} over 1" for n in widths[1:])], [_speed(found, cell, widths[1:]) for cell in ours])
    )
    if long := [line for cell in found if cell.task == "contexts" for line in _contexts(found, cell)]:
        parts.append(table(CONTEXTS, long))
    parts += [f"{cell.file}, {cell.engine} {cell.task}: {row['failed']}" for cell, row in failed.items()]
    return "\n\n".join(parts) + "\n"


def _loading(found: Mapping[Cell, Row], second: Cell) -> list[str]:
    row, first = found[second], found.get(second._replace(task="first"))
    bare = found.get(second._replace(engine="", task="imports"))
    resident = row["found"]["resident"] - (bare["found"]["resident"] if bare and second.engine != LLAMA_CPP else 0)
    return [
        *(second.file, second.engine, f"{row['bytes'] / GB:.2f}"),
        *(f"{first['found']['seconds']:.1f}" if first else "", f"{row['found']['seconds']:.1f}"),
        *(f"{resident / GB:.2f}", f"{(resident - row['bytes']) / MB:.0f}", f"{row['found']['peak'] / GB:.2f}"),
        f"{((first['written'] if first else 0) + row['written']) / MB:.1f}",
    ]


def _speed(found: Mapping[Cell, Row], own: Cell, widths: Sequence[int]) -> list[str]:
    row = found[own]
    peer = next((found[c] for c in found if c == own._replace(engine=c.engine) and c != own), None)
    sides = {}
    for name in ("decode", "prompt"):
        values = row["found"][name]
        other = median(peer["found"][name]) if peer else None
        ratio = ["", ""] if other is None else [f"{other:.3g}", f"{median(values) / other:.2f}"]
        sides[name] = [f"{median(values):.3g} ({min(values):.3g}..{max(values):.3g})", *ratio]
    most, cost = (
        found.get(own._replace(engine=engine, task=task)) for engine, task in (("", "bandwidth"), (OURS, "verify"))
    )
    share = ""
    if most:
        rate = most["found"]["bytes_per_second"]
        share = f"{row['token_bytes'] * median(row['found']['decode']) / rate:.2f} of {rate / GB:.1f}"
    seconds = cost["found"]["seconds"] if cost else {}
    costs = [f"{seconds[str(width)] / seconds['1']:.2f}" if str(width) in seconds else "" for width in widths]
    return [own.file, str(own.threads), *sides["decode"], share, *sides["prompt"], *costs]


def _contexts(found: Mapping[Cell, Row], own: Cell) -> list[list[str]]:
    """A line per context. The share counts weights, keys and values."""
    row, most = found[own], found.get(own._replace(engine="", task="bandwidth"))
    lines = []
    for context, rate in row["found"]["rates"].items():
        size, share = row["token_bytes"] + int(context) * row["found"]["kept_bytes"], ""
        if most:
            available = most["found"]["bytes_per_second"]
            share = f"{size * rate / available:.2f} of {available / GB:.1f}"
        lines.append([own.file, str(own.threads), context, f"{rate:.3g}", share])
    return lines
