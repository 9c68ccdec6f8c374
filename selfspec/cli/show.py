"""What a person sees beside the text itself: the legend, lines and tables, and the picture of a finished run."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfspec.cli.pieces import STYLES, Painter, Piece
from selfspec.control.plan import LOOKUP
from selfspec.decoding.outputs import SpecStats
from selfspec.decoding.results import Round

PICTURE_WIDTH = 100
POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)  # of drafts, that the table shows
MOST_PLANS = 6  # exit layers and other plans that it names


def legend(exit_layer: int | None, num_layers: int, free: Sequence[str] = ()) -> Text:
    """What the colours mean.

    Args:
        exit_layer: None is one that changes, 0 is none.
        free: what else drafts, such as "lookup".
    """
    early = {None: "early layers", 1: "layer 1"}.get(exit_layer, f"layers 1-{exit_layer}")
    names = [*([] if exit_layer == LOOKUP else [early]), *free]
    drafters = " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    parts = [
        (f"drafted by {drafters}, accepted", STYLES["accepted"]),
        (f"written by all {num_layers} layers", STYLES["own"]),
        ("rejected draft", STYLES["rejected"]),
    ]
    return Text("  ").join(Text(*part) for part in parts)


class Timed(Protocol):
    """What the closing line needs of a comparison with plain decoding and with transformers' `generate`."""

    @property
    def plain(self) -> float: ...  # seconds
    @property
    def speedup(self) -> float: ...
    @property
    def first_difference(self) -> int | None: ...
    @property
    def generate(self) -> float | None: ...  # seconds; None where it was not asked
    @property
    def generate_difference(self) -> int | None: ...


def closing_line(num_tokens: int, seconds: float, stats: SpecStats, comparison: Timed | None = None) -> Text:
    """Speed, acceptance length and, when other ways were timed too, the speedup over them."""
    line = Text()
    line.append(f"{num_tokens / seconds:.0f} tokens/s", "bold")
    line.append(f" · acceptance length {stats.mean_acceptance_length:.2f}")
    if comparison is None:
        return line
    line.append(" · ")
    line.append(f"{comparison.speedup:.2f}x plain decoding", "bold")
    line.append(f" ({num_tokens / comparison.plain:.0f} tokens/s) · ")
    line.append_text(_same(num_tokens, comparison.first_difference))
    if comparison.generate is not None:
        line.append(" · ")
        line.append(f"{comparison.generate / seconds:.2f}x transformers' generate", "bold")
        line.append(f" ({num_tokens / comparison.generate:.0f} tokens/s) · ")
        line.append_text(_same(num_tokens, comparison.generate_difference))
    return line


def _same(num_tokens: int, first_difference: int | None) -> Text:
    if first_difference is None:
        return Text(f"same {num_tokens} tokens", "green")
    return Text(f"tokens differ from number {first_difference + 1} on (rounding)", "red")


def plan_line(number: int, round_: Round) -> Text:
    """A round in one line: what drafted, how far it might have drafted, and what became of it.

    Of drafts with branches, what was drafted on the branch that the output followed, and how many tokens beside it.
    """
    plan, rows = round_.plan, round_.rows
    parts = [f"round {number:>4}"]
    if len(rows) > 1:
        parts.append(f"{len(rows):>2} rows")
    if plan is None or round_.exit_layer is None:
        return Text("  ".join([*parts, "plain"]), "dim")
    drafted, accepted = sum(len(row.drafted) for row in rows), sum(row.num_accepted for row in rows)
    beside = sum(row.num_beside for row in rows)
    more = f" +{beside} beside" if beside else ""
    source = (
        "lookup" if round_.exit_layer == LOOKUP else f"exit {round_.exit_layer:>2}  up to {max(plan.draft_lengths):>2}"
    )
    parts += [source, f"drafted {drafted:>2}{more}", f"accepted {accepted:>2}"]
    if round_.exit_layer == LOOKUP:
        return Text("  ".join(parts), "dim")
    if plan.speedup is not None:
        parts.append(f"{plan.speedup:.2f}x expected")
    if plan.stop is not None:
        parts.append(f"stops below {min(plan.stop.least, 1):.0%}")
    elif plan.min_confidence > 0:
        parts.append(f"stops at a token below {plan.min_confidence:.0%}")
    return Text("  ".join(parts), "dim")


def stats_table(stats: SpecStats, stages: Mapping[str, float], plans: Mapping[str, int] | None = None) -> Table:
    """Acceptance, exit layers and time in one narrow table that fits on a screen, whatever the model.

    Args:
        plans: rounds by exit layer, or "lookup", or "plain".
    """
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    rounds = stats.num_spec_steps + stats.num_plain_steps
    table.add_row("tokens", str(stats.num_generated_tokens))
    table.add_row("rounds (without a draft)", f"{rounds} ({stats.num_plain_steps})")
    for name, share in _shares(plans or {}).items():
        table.add_row(f"  {name}", f"{share:.0%}")
    table.add_row("drafted tokens", str(stats.num_draft_tokens))
    if stats.num_branch_tokens:
        table.add_row("  beside the branch that was followed", str(stats.num_branch_tokens))
    table.add_row("accepted", f"{stats.num_accepted_draft_tokens} ({stats.draft_acceptance_rate:.0%})")
    for i, (joint, conditional) in enumerate(stats.acceptance_by_position(), 1):
        if i in POSITIONS:
            table.add_row(f"  position {i} (after the one before)", f"{joint:.0%} ({conditional:.0%})")
    total = sum(stages.values())
    table.add_row("seconds", f"{total:.3f}")
    for stage, seconds in stages.items():
        table.add_row(f"  {stage}", f"{seconds:.3f} ({seconds / total if total else 0:.0%})")
    return table


def _shares(plans: Mapping[str, int]) -> dict[str, float]:
    """Shares of rounds, in the order of the plans; rare exit layers are counted together."""
    total = sum(plans.values())
    often = sorted(plans, key=plans.__getitem__, reverse=True)[:MOST_PLANS]
    shares = {
        (name if name in ("plain", "lookup") else f"exit {name}"): count / total
        for name, count in plans.items()
        if name in often
    }
    return shares if len(often) == len(plans) else shares | {"other exits": 1 - sum(shares.values())}


def picture(pieces: Sequence[Piece], legend: Text | None, closing: Text, title: str) -> str:
    """A finished run as an SVG of a terminal, in colours whatever this process runs in."""
    console = Console(
        record=True, file=io.StringIO(), width=PICTURE_WIDTH, force_terminal=True, color_system="truecolor", _environ={}
    )
    if legend is not None:
        console.print(legend, end="\n\n")
    painter = Painter(console, PICTURE_WIDTH)
    painter.write(pieces)
    painter.end()
    console.print()
    console.print(closing)
    return console.export_svg(title=title)
