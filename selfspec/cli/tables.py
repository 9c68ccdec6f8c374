"""The tables of `selfspec calibrate`: measured costs in milliseconds, and the plans they imply."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from selfspec.calibrate.forecast import ACCEPTANCE, Choice, exits_of
from selfspec.control.costs import CONTEXT, Costs
from selfspec.core import LOOKUP

WIDTHS = (1, 2, 4, 8)  # tokens per row of a verification
HEAD_TOKENS = (1, 4, 16, 64, 128)
FURTHER = 128  # cached tokens
Titled = tuple[str, Table]


def by_rows(costs: Costs, sizes: Sequence[int]) -> Titled:
    """Rounds and draft steps; a column per batch size."""
    table = _table("rows", sizes)
    for width in WIDTHS:
        name = f"verification: all layers, {width} tokens per row" if width > 1 else "plain: a token per row"
        table.add_row(name, *(_ms(costs.verify(LOOKUP, rows, width * rows)) for rows in sizes))
    for e in exits_of(costs.num_layers):
        name = f"draft step: {e} layer{'s' * (e > 1)}, head and pick, a token per row"
        table.add_row(name, *(_ms(costs.step(e, rows)) for rows in sizes))
    name = f"keys and values: {FURTHER} more tokens of each row, all layers"
    table.add_row(name, *(_ms(costs.reading(rows, CONTEXT + FURTHER)) for rows in sizes))
    return "Milliseconds, by rows decoded together", table


def by_tokens(costs: Costs) -> Titled:
    """The head, and the choice of tokens from its logits."""
    table = _table("tokens", HEAD_TOKENS)
    table.add_row("head and pick", *(_ms(costs.head(n)) for n in HEAD_TOKENS))
    return "Milliseconds, by tokens in all", table


def assumed(choices: Sequence[Choice]) -> Titled:
    """Draft lengths and speedups; a column per assumed acceptance rate."""
    table = _table("rows", ["exit layer", *(f"{rate:.0%}" for rate in ACCEPTANCE)])
    last = None
    for (rows, exit_layer), own in groupby(choices, key=lambda choice: (choice.batch_size, choice.exit_layer)):
        table.add_row("" if rows == last else str(rows), str(exit_layer), *map(_gain, own))
        last = rows
    return "Speedup over plain decoding @ drafted tokens per round, where so many of them are right", table


def seen(choices: Sequence[Choice]) -> Titled:
    """The best plan for each batch size."""
    table = _table("rows", ["exit layer", "right", "speedup"])
    for choice in choices:
        facts = (str(choice.exit_layer), f"{choice.acceptance:.0%}") if choice.num_speculative_tokens else ("", "")
        table.add_row(str(choice.batch_size), *facts, _gain(choice))
    return "The best of them, by how often drafts of this very model were right so far", table


def _table(first: str, columns: Sequence[object]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, style="dim")
    for column in columns:
        table.add_column(str(column), justify="right")
    return table


def _gain(choice: Choice) -> Text:
    if not choice.num_speculative_tokens:
        return Text("plain", "dim")
    return Text(f"{choice.speedup:.2f}x @{choice.num_speculative_tokens:>2}", "green" if choice.speedup >= 1.1 else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
