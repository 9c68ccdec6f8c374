"""What a person sees: coloured drafts, a closing line, tables, and the picture of a finished run."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from selfspec.control.plan import LOOKUP, Plan
from selfspec.decoding.results import RowResult
from selfspec.decoding.stats import SpecStats
from selfspec.decoding.stopping import TextStream

Kind = Literal["prompt", "accepted", "own", "rejected"]
STYLES: dict[Kind, str] = {"prompt": "dim", "accepted": "green", "own": "bold", "rejected": "red strike"}
PICTURE_WIDTH = 100
TAB = 4
_CONTROL = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))  # all but tab and newline


class Piece(NamedTuple):
    """A stretch of text and where it comes from; rejected pieces are no part of the output."""

    text: str
    kind: Kind


class Pieces:
    """Cuts a row's rounds into pieces. Without the rejected ones they add up to the row's text."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, prompt, stop)
        self._tail = list(prompt[-TextStream.CONTEXT :])

    def of(self, row: RowResult) -> list[Piece]:
        """The pieces of one round, in the order in which they are read."""
        made: list[Piece] = []
        kind: Kind = "accepted"
        for i, token in enumerate(row.tokens):
            if i == row.num_accepted:
                kind = "own"
                made += self._rejected(row.drafted[i:])
            made += self._push([token], kind)
            self._tail = [*self._tail, token][-TextStream.CONTEXT :]
        if row.completion is not None:
            made += self._push([], kind, last=True)
        return made

    def _push(self, tokens: list[int], kind: Kind, last: bool = False) -> list[Piece]:
        text = "" if self._stream.found is not None else self._stream.push(tokens, last)
        return [Piece(text, kind)] if text else []

    def _rejected(self, drafted: Sequence[int]) -> list[Piece]:
        """The draft the target did not agree to. What was drafted after it never had a chance, and is not shown."""
        if not drafted:
            return []
        before, after = (self._decode(ids) for ids in (self._tail, [*self._tail, drafted[0]]))
        text = after[len(before) :]
        word = text.strip()
        if not word or "\n" in word or "\ufffd" in word:
            return []
        return [Piece(text[: text.index(word)].replace("\n", ""), "rejected"), Piece(word, "rejected")]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Painter:
    """Writes pieces to a console as they come, and breaks lines between words; a word waits until it is whole.

    Args:
        width: columns of a line; None never breaks one.
        aside: where the prompt goes, when that is another stream of the same terminal.
    """

    def __init__(self, console: Console, width: int | None = None, aside: Console | None = None) -> None:
        self._console, self._aside, self._width = console, aside or console, width
        self._column = 0
        self._space: list[Piece] = []
        self._word: list[Piece] = []

    def write(self, pieces: Iterable[Piece]) -> None:
        for text, kind in pieces:
            for part in re.findall(r"\n|[^\S\n]+|\S+", text.translate(_CONTROL)):
                if not part.isspace():
                    self._word.append(Piece(part, kind))
                    continue
                self._put_word()
                self._space.append(Piece(part.replace("\t", " " * TAB), kind))
                if part == "\n":
                    self._put_space()
        if self._width is None:
            self._put_word()

    def end(self) -> None:
        """Write what is left, and end the line."""
        self._put_word()
        self._space.append(Piece("\n", "own"))
        self._put_space()

    def _put_word(self) -> None:
        if not self._word:
            return
        wide = sum(cell_len(text) for text, _ in [*self._space, *self._word])
        if self._width is not None and self._space and 0 < self._column <= self._width < self._column + wide:
            self._space = [Piece("\n", self._word[0].kind)]
        self._put_space()
        self._put(self._word)
        self._word = []

    def _put_space(self) -> None:
        self._put(self._space)
        self._space = []

    def _put(self, pieces: Iterable[Piece]) -> None:
        for text, kind in pieces:
            self._column = 0 if text == "\n" else self._column + cell_len(text)
            console = self._aside if kind == "prompt" else self._console
            style = "" if text.isspace() else STYLES[kind]  # a struck-out blank is noise
            console.print(Text(text, style), end="", soft_wrap=True, highlight=False)
            console.file.flush()


def wants_colour(stream: TextIO) -> bool:
    """NO_COLOR beats FORCE_COLOR beats whether the stream is a terminal that can."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def same_place(one: TextIO, other: TextIO) -> bool:
    """Whether two streams end up in the same terminal, file or pipe."""
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):  # not a file: somebody has put another object there
        return one.isatty() and other.isatty()


def make_console(stream: TextIO, quiet: bool = False) -> Console:
    """A console in the terminal's own sixteen colours; without colours it writes plain text."""
    colour = wants_colour(stream)
    return Console(
        file=stream,
        quiet=quiet,
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
        width=None if stream.isatty() else 120,
        highlight=False,
    )


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
    """What the closing line needs of a comparison with plain decoding."""

    @property
    def plain(self) -> float: ...  # seconds
    @property
    def speedup(self) -> float: ...
    @property
    def first_difference(self) -> int | None: ...


def closing_line(num_tokens: int, seconds: float, stats: SpecStats, comparison: Timed | None = None) -> Text:
    """Speed, acceptance length and, when plain decoding was timed too, the speedup over it."""
    line = Text()
    line.append(f"{num_tokens / seconds:.0f} tokens/s", "bold")
    line.append(f" · acceptance length {stats.mean_acceptance_length:.2f}")
    if comparison is None:
        return line
    line.append(" · ")
    line.append(f"{comparison.speedup:.2f}x plain decoding", "bold")
    line.append(f" ({num_tokens / comparison.plain:.0f} tokens/s) · ")
    if comparison.first_difference is None:
        line.append(f"same {num_tokens} tokens", "green")
    else:
        line.append(f"tokens differ from number {comparison.first_difference + 1} on (rounding)", "red")
    return line


def plan_line(number: int, plan: Plan, rows: Sequence[RowResult]) -> Text:
    """A round in one line: where it left early, how far it might have drafted, and what became of it.

    Of drafts with branches, what was drafted on the branch that the output followed, and how many tokens beside it.
    """
    parts = [f"round {number:>4}"]
    if len(plan.draft_lengths) > 1:
        parts.append(f"{len(plan.draft_lengths):>2} rows")
    if plan.exit_layer is None:
        return Text("  ".join([*parts, "plain"]), "dim")
    least, most = min(plan.draft_lengths), max(plan.draft_lengths)
    span = str(most) if least == most else f"{least}..{most}"
    drafted, accepted = sum(len(row.drafted) for row in rows), sum(row.num_accepted for row in rows)
    beside = sum(row.num_beside for row in rows)
    source = "lookup " if plan.exit_layer == LOOKUP else f"exit {plan.exit_layer:>2}"
    size = f"tree of {span:>2}" if _has_branches(plan) else f"up to {span:>2}"
    more = f" +{beside} beside" if beside else ""
    parts += [source, size, f"drafted {drafted:>2}{more}", f"accepted {accepted:>2}"]
    if plan.speedup is not None:
        parts.append(f"{plan.speedup:.2f}x expected")
    if plan.stop is not None:
        parts.append(f"stops below {min(plan.stop.least, 1):.0%}")
    elif plan.min_confidence > 0:
        parts.append(f"stops at a token below {plan.min_confidence:.0%}")
    return Text("  ".join(parts), "dim")


def _has_branches(plan: Plan) -> bool:
    trees = [tree for tree in plan.trees or () if tree is not None]
    return any(tree.parents != tuple(range(len(tree.parents))) for tree in trees)


def stats_table(stats: SpecStats, stages: Mapping[str, float], plans: Mapping[str, int] | None = None) -> Table:
    """Acceptance, exit layers and time in one narrow table.

    Args:
        plans: rounds by exit layer, or "lookup", or "plain".
    """
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    rounds = stats.num_spec_steps + stats.num_plain_steps
    table.add_row("tokens", str(stats.num_generated_tokens))
    table.add_row("rounds (without a draft)", f"{rounds} ({stats.num_plain_steps})")
    for exit_layer, count in (plans or {}).items():
        name = exit_layer if exit_layer in ("plain", "lookup") else f"exit {exit_layer}"
        table.add_row(f"  {name}", f"{count / sum((plans or {}).values()):.0%}")
    table.add_row("drafted tokens", str(stats.num_draft_tokens))
    if stats.num_side_tokens:
        table.add_row("  beside the branch that was followed", str(stats.num_side_tokens))
    table.add_row("accepted", f"{stats.num_accepted_draft_tokens} ({stats.draft_acceptance_rate:.0%})")
    for i, (joint, conditional) in enumerate(stats.acceptance_by_position(), 1):
        table.add_row(f"  position {i} (after the one before)", f"{joint:.0%} ({conditional:.0%})")
    total = sum(stages.values())
    table.add_row("seconds", f"{total:.3f}")
    for stage, seconds in stages.items():
        table.add_row(f"  {stage}", f"{seconds:.3f} ({seconds / total if total else 0:.0%})")
    return table


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
