"""Coloured drafts: `PieceCutter` cuts rounds into pieces of text by where they come from; `paint` writes them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from selfspec.core import Request, RowRound

Kind = Literal["prompt", "accepted", "own", "rejected"]
STYLES: dict[Kind, str] = {"prompt": "dim", "accepted": "green", "own": "bold", "rejected": "red strike"}
PICTURE_WIDTH = 100
CONTEXT = 6  # tokens before a rejected one, with which it is turned into text
_CONTROL = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160))) | {9: "    "}  # a text must not steer terminals


class Piece(NamedTuple):
    """A stretch of text and where it comes from; rejected pieces are no part of the output."""

    text: str
    kind: Kind


class PieceCutter:
    """Cuts a sequence's rounds into pieces. Without the rejected ones they add up to the sequence's text."""

    def __init__(self, tokenizer: Any, request: Request) -> None:
        from selfspec.decoding.stopping import TextRules, TextStream

        self._tokenizer = tokenizer
        self._stream = TextStream(
            tokenizer, request.prompt_token_ids, request.params.stops, TextRules.of(request.params)
        )
        self._context = request.prompt_token_ids[-CONTEXT:]

    def pieces(self, row: RowRound) -> list[Piece]:
        """The pieces of one round, in the order in which they are read."""
        made: list[Piece] = []
        kind: Kind = "accepted"
        for i, token in enumerate(row.token_ids):
            if i == row.num_accepted:
                kind = "own"
                made += self._rejected(row.drafted[i:])
            made += self._push([token], kind)
            self._context = [*self._context, token][-CONTEXT:]
        if row.finish_reason is not None:
            made += self._push([], kind, last=True)
        return made

    def _push(self, tokens: list[int], kind: Kind, last: bool = False) -> list[Piece]:
        text = "" if self._stream.found is not None else self._stream.push(tokens, last)
        return [Piece(text, kind)] if text else []

    def _rejected(self, drafted: Sequence[int]) -> list[Piece]:
        """The first rejected token, where it is text of one line; those after it were not judged."""
        before, after = (self._decode(ids) for ids in (self._context, [*self._context, *drafted[:1]]))
        text = after[len(before) :]
        word = text.strip()
        if not word or "\n" in word or "\ufffd" in word:
            return []
        return [Piece(text[: text.index(word)].replace("\n", ""), "rejected"), Piece(word, "rejected")]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def coloured(pieces: Iterable[Piece]) -> Text:
    """The pieces as one text, without characters that steer terminals."""
    styled = ((text.translate(_CONTROL), "" if text.isspace() else STYLES[kind]) for text, kind in pieces)
    return Text.assemble(*styled)


def paint(console: Console, pieces: Iterable[Piece]) -> None:
    """Write pieces at once, without a line break at the end."""
    console.print(coloured(pieces), end="", soft_wrap=True)
    console.file.flush()


def legend(num_layers: int) -> Text:
    """What the colours mean."""
    parts = [
        ("accepted draft", STYLES["accepted"]),
        (f"written by all {num_layers} layers", STYLES["own"]),
        ("rejected draft", STYLES["rejected"]),
    ]
    return Text("  ").join(Text(*part) for part in parts)


def picture(pieces: Iterable[Piece], legend: Text | None, closing: Text, title: str) -> str:
    """A finished run as an SVG of a terminal, in colours whatever this process runs in."""
    console = Console(
        record=True, file=io.StringIO(), width=PICTURE_WIDTH, force_terminal=True, color_system="truecolor", _environ={}
    )
    if legend is not None:
        console.print(legend, end="\n\n")
    console.print(coloured(pieces), end="\n\n", highlight=False)
    console.print(closing)
    return console.export_svg(title=title)
