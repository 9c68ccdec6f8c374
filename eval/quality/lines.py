"""JSON lines with fields of text, checked line by line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def read_lines(path: str | Path, fields: Sequence[str], limit: int = 0) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and the named fields of every line that is not blank; after `limit` of them it stops, 0: never.

    Raises:
        ValueError: the file cannot be read or has no line, or a line lacks a field or has one that is not a text.
    """
    try:
        lines = Path(path).read_text("utf-8").split("\n")  # not splitlines(): JSON allows U+2028 within a text
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(f"cannot read the questions {str(path)!r}: {problem}") from problem
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise ValueError(f"the question file {str(path)!r} is empty; give one JSON object per line")
    for number, line in filled[: limit or None]:
        yield number, _fields(f"{path}, line {number}", line, fields)


def _fields(where: str, line: str, fields: Sequence[str]) -> dict[str, str]:
    try:
        content: Any = json.loads(line)
    except ValueError as problem:
        raise ValueError(f"{where}: not JSON ({problem})") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{where}: must be a JSON object with {', '.join(fields)}, got {type(content).__name__}")
    for name in fields:
        if not isinstance(content.get(name), str) or not content[name].strip():
            raise ValueError(f"{where}: field {name!r} must be a non-empty text, got {content.get(name)!r}")
    return {name: content[name] for name in fields}
