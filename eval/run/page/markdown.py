"""A page as Markdown, its figures beside it."""

from __future__ import annotations

from collections.abc import Iterable

from eval.run.page.blocks import Block, Code, Figure, Listing, Page, Paragraph, Strong, Table, Text


def render(page: Page) -> str:
    """The whole file."""
    parts = [f"# {page.title}", *map(_block, page.opening)]
    for section in page.sections:
        parts += [f"## {section.title}", *map(_block, section.blocks)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    match block:
        case Paragraph():
            return _text(block.text)
        case Listing():
            return "\n".join(f"- {_text(item)}" for item in block.items)
        case Table():
            head: list[Text] = [(name,) for name in block.head]
            rule = "| " + " | ".join(["---", *["---:"] * (len(head) - 1)]) + " |"
            return "\n".join([_line(head), rule, *map(_line, block.rows)])
        case Figure():
            return f"![{block.title}](figures/{block.name}.svg)\n\n{_text(block.caption)}"


def _line(cells: Iterable[Text]) -> str:
    texts = (" ".join(_text(cell).split()) for cell in cells)  # a line's end would end the table
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def _text(text: Text) -> str:
    return "".join(map(_piece, text))


def _piece(piece: str) -> str:
    match piece:
        case Code():
            fence = "`" if "`" not in piece else "`` "
            return f"{fence}{piece}{fence[::-1]}"
        case Strong():
            return f"**{piece}**"
    return piece.replace("<", "\\<")  # where data are shown, they must not become tags
