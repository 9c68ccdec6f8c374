"""Documents of a corpus, as text and as tokens: a text file is one, and so is every line of a JSON-lines file."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

JSON_LINES = (".jsonl", ".ndjson")
PIECE = 1 << 16  # characters of a text file tokenized at a time
TOGETHER = 1 << 20  # characters tokenized in one call
_SEAM = re.compile(r"\n(?=\S)")


def documents(files: Sequence[Path], tokenizer: Any, field: str) -> Iterator[NDArray[np.uint32]]:
    """Token ids of every document, without special tokens of the tokenizer's own.

    Args:
        field: where a line of a JSON-lines file (.jsonl, .ndjson) has its text.

    Raises:
        ValueError: a file that cannot be read, is not UTF-8, or holds a line without such a text.
    """
    parts: list[NDArray[np.uint32]] = []
    for batch in _batches(piece for file in files for piece in pieces(file, field)):
        ids = tokenizer([text for text, _ in batch], add_special_tokens=False, verbose=False)["input_ids"]
        for tokens, (_, ends) in zip(ids, batch, strict=True):
            parts.append(np.array(tokens, np.uint32))
            if ends:
                yield np.concatenate(parts)
                parts = []


def pieces(file: Path, field: str) -> Iterator[tuple[str, bool]]:
    """A file's documents in pieces, each with whether its document ends there.

    Pieces of a text are cut where a line begins that is not indented, which byte-level tokenizers do not notice; one
    that marks the beginning of a text has a token of its own there, once in 64 thousand characters.
    """
    try:
        if file.suffix.lower() in JSON_LINES:
            yield from ((text, True) for text in _lines(file, field))
        else:
            yield from _blocks(file)
    except UnicodeDecodeError:
        raise ValueError(f"{file}: not valid UTF-8; convert it to UTF-8 first, or leave it out") from None
    except OSError as problem:
        raise ValueError(f"{file} cannot be read ({problem.strerror}); give text or JSON-lines files") from None


def _blocks(file: Path) -> Iterator[tuple[str, bool]]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        text = ""
        while block := stream.read(PIECE):
            text += block
            cut = max((found.end() for found in _SEAM.finditer(text)), default=0)
            if not cut and len(text) > 16 * PIECE:
                cut = len(text)
            if cut:
                yield text[:cut], False
                text = text[cut:]
        yield text, True


def _lines(file: Path, field: str) -> Iterator[str]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            text = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode()
            if text.strip():
                yield _text_of(text, f"{file}, line {number}", field)


def _text_of(line: str, where: str, field: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{where}: not valid JSON ({problem}); every line must be one object with a text") from None
    text = found.get(field) if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{where}: holds no text under {field!r}; choose the field that does")
    return text.encode(errors="replace").decode()  # half a surrogate pair is no text


def _batches(given: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for piece in given:
        batch.append(piece)
        size += len(piece[0]) + 1
        if size > TOGETHER:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
