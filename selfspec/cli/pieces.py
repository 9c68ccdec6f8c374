"""`Piece`, a stretch of text and where it comes from: `Pieces` cuts rounds into them, `Painter` paints them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from selfspec.decoding.results import RowResult
from selfspec.decoding.stopping import TextStream

Kind = Literal["prompt", "accepted", "own", "rejected"]
STYLES: dict[Kind, str] = {"prompt": "dim", "accepted": "green", "own": "bold", "rejected": "red strike"}
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
