"""A page as one file of HTML that opens from a disk: its style and figures are inside, and it loads nothing."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from eval.run.page.blocks import Aside, Block, Code, Figure, Listing, Page, Paragraph, Section, Strong, Table, Text

STYLE = Path(__file__).with_name("style.css")
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
WORDS = 40  # a column with a cell of more letters is read, not compared


def render(page: Page) -> str:
    """The whole file."""
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{escape(f'{page.title}: {page.about}' if page.about else page.title)}</title>",
        f"<style>\n{STYLE.read_text('utf-8')}</style>",
        "</head>",
        "<body>",
        "<main>",
        f"<h1>{escape(page.title)}</h1>",
        *(_block(block, page.title) for block in page.opening),
        *map(_section, page.sections),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def _section(section: Section) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", section.title.lower())
    blocks = "\n".join(_block(block, section.title) for block in section.blocks)
    heading = f'<h2 id="{name}">{escape(section.title)}</h2>'
    return f'<section aria-labelledby="{name}">\n{heading}\n{blocks}\n</section>'


def _block(block: Block, title: str) -> str:
    match block:
        case Paragraph():
            return f"<p>{_text(block.text)}</p>"
        case Listing():
            return "\n".join(["<ul>", *(f"<li>{_text(item)}</li>" for item in block.items), "</ul>"])
        case Table():
            return _table(block, title)
        case Figure():
            return _figure(block)


def _table(table: Table, title: str) -> str:
    """In a box that scrolls by itself, with the keyboard too."""
    is_words = [any(sum(map(len, row[i])) > WORDS for row in table.rows) for i in range(len(table.head))]
    kinds = [' class="words"' if words else "" for words in is_words]
    head = "".join(f'<th scope="col"{k}>{_breakable(name)}</th>' for k, name in zip(kinds, table.head, strict=True))
    lines = [
        f'<div class="table" role="region" tabindex="0" aria-label="Table: {escape(title)}">',
        f"<table>\n<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>",
        *(_row(row, kinds) for row in table.rows),
        "</tbody>\n</table>\n</div>",
    ]
    return "\n".join(lines)


def _row(cells: Sequence[Text], kinds: Sequence[str]) -> str:
    rest = "".join(f"<td{kind}>{_text(cell)}</td>" for cell, kind in zip(cells[1:], kinds[1:], strict=True))
    return f'<tr><th scope="row">{_text(cells[0])}</th>{rest}</tr>'


def _figure(figure: Figure) -> str:
    """The picture as an image of its own: ids inside several SVGs would get in each other's way."""
    content = b64encode(figure.svg.encode()).decode()
    image = f'<img src="data:image/svg+xml;base64,{content}" alt="{escape(figure.title)}">'
    caption = f"<b>{escape(figure.title)}.</b> {_text(figure.caption)}"
    return f"<figure>\n{image}\n<figcaption>{caption}</figcaption>\n</figure>"


def _text(text: Text) -> str:
    return "".join(map(_piece, text))


def _piece(piece: str) -> str:
    match piece:
        case Code():
            return f"<code>{_breakable(piece)}</code>"
        case Strong():
            return f"<strong>{escape(piece)}</strong>"
        case Aside():
            return f"<small>{escape(piece)}</small>"
    return escape(piece)


def _breakable(name: str) -> str:
    """A name that may go on in the next line after its parts."""
    return "<wbr>".join(escape(part) for part in re.split(r"(?<=[:_/])(?=.{4})", name))
