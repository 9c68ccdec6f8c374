"""What a page is made of. Text is a tuple of pieces: plain strings, and those below that are shown otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class Code(str):
    """A name from code or data."""

    __slots__ = ()


class Strong(str):
    """What must not be overlooked."""

    __slots__ = ()


class Aside(str):
    """What belongs to the piece before it, such as its interval."""

    __slots__ = ()


Text = tuple[str, ...]


@dataclass(frozen=True)
class Paragraph:
    text: Text


@dataclass(frozen=True)
class Listing:
    items: Sequence[Text]


@dataclass(frozen=True)
class Table:
    """The first column names the row."""

    head: Sequence[str]
    rows: Sequence[Sequence[Text]]


@dataclass(frozen=True)
class Figure:
    """A picture that also lies in the page's folder as `figures/NAME.svg`."""

    name: str
    title: str
    caption: Text
    svg: str


Block = Paragraph | Listing | Table | Figure


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    title: str
    about: str  # what tells this page from others of its title; may be empty
    opening: Sequence[Block]
    sections: Sequence[Section]


def plain(text: str) -> Text:
    """Text without marks; line ends and runs of blanks become one blank."""
    return (" ".join(text.split()),)
