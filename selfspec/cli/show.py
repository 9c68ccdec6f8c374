"""What a person sees beside the text itself: lines about rounds, a closing line, and a table of statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from selfspec.core import LOOKUP, RoundOutput
from selfspec.decoding.outputs import SpecStats
from selfspec.drafting.grammar import drafter_of

if TYPE_CHECKING:
    from selfspec.cli.compare import Comparison
    from selfspec.cli.session import Run

POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)  # of drafts, that the table shows
MOST_PLANS = 6  # exit layers and other plans that it names


def closing_line(run: Run, comparison: Comparison | None = None) -> Text:
    """Speed, acceptance length and, where plain decoding and `generate` were timed too, the speedups over them."""
    num_tokens, seconds = len(run.token_ids), run.seconds if comparison is None else comparison.drafted
    line = Text.assemble((f"{num_tokens / seconds:.0f} tokens/s", "bold"))
    line.append(f" · acceptance length {run.stats.mean_acceptance_length:.2f}")
    if comparison is None:
        return line
    others = [("plain decoding", comparison.plain, comparison.first_difference)]
    if comparison.generate is not None:
        others.append(("transformers' generate", comparison.generate, comparison.generate_difference))
    for name, other, difference in others:
        line.append(" · ").append(f"{other / seconds:.2f}x {name}", "bold")
        line.append(f" ({num_tokens / other:.0f} tokens/s) · ")
        if difference is None:
            line.append(f"same {num_tokens} tokens", "green")
        else:
            line.append(f"tokens differ from number {difference + 1} on (rounding)", "red")
    return line


def what_drafted(run: Run, comparison: Comparison) -> str:
    """What drafted how many tokens, and what it gained, in a sentence."""
    gained = f"{comparison.plain / comparison.drafted:.2f} times as fast as plain decoding"
    names = {"grammar": "the grammar", "lookup": "lookup in the text so far", "exit": "early layers"}
    drafted, right = run.num_drafted, run.num_accepted
    told = [
        f"{drafted[one]} tokens by {name}, {right[one]} of them right" for one, name in names.items() if drafted[one]
    ]
    return f"Drafted: {'; '.join(told) or 'nothing'}. {gained}."


def plan_line(number: int, round_: RoundOutput) -> str:
    """A round in one line: what drafted, how far it might have drafted, and what became of it."""
    plan, rows = round_.plan, round_.rows
    parts = [f"round {number:>4}"]
    if len(rows) > 1:
        parts.append(f"{len(rows):>2} rows")
    if plan is None or round_.exit_layer is None:
        return "  ".join([*parts, "plain"])
    is_lookup = round_.exit_layer == LOOKUP
    parts.append(
        drafter_of(round_) if is_lookup else f"exit {round_.exit_layer:>2}  up to {max(plan.draft_lengths):>2}"
    )
    parts.append(f"drafted {sum(len(row.drafted) for row in rows):>2}")
    parts.append(f"accepted {sum(row.num_accepted for row in rows):>2}")
    if is_lookup:
        return "  ".join(parts)
    if plan.speedup is not None:
        parts.append(f"{plan.speedup:.2f}x expected")
    if plan.stop is not None:
        parts.append(f"stops below {min(plan.stop.least, 1):.0%}")
    elif plan.min_confidence > 0:
        parts.append(f"stops at a token below {plan.min_confidence:.0%}")
    return "  ".join(parts)


def stats_table(stats: SpecStats, seconds_by_stage: Mapping[str, float], plans: Mapping[str, int]) -> Table:
    """Acceptance, plans and time in one narrow table that fits on a screen, whatever the model.

    Args:
        plans: rounds by exit layer, or "lookup", or "plain".
    """
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    rounds = stats.num_spec_steps + stats.num_plain_steps
    table.add_row("tokens", str(stats.num_generated_tokens))
    table.add_row("rounds (without a draft)", f"{rounds} ({stats.num_plain_steps})")
    for name, share in _shares(plans).items():
        table.add_row(f"  {name}", f"{share:.0%}")
    table.add_row("drafted tokens", str(stats.num_draft_tokens))
    table.add_row("accepted", f"{stats.num_accepted_draft_tokens} ({stats.draft_acceptance_rate:.0%})")
    for i, (joint, conditional) in enumerate(stats.acceptance_by_position(), 1):
        if i in POSITIONS:
            table.add_row(f"  position {i} (after the one before)", f"{joint:.0%} ({conditional:.0%})")
    total = sum(seconds_by_stage.values())
    table.add_row("seconds", f"{total:.3f}")
    for stage, seconds in seconds_by_stage.items():
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
