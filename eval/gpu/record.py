"""What was measured so far: written after every figure, so that a run that is cut short keeps what it had."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

Content = dict[str, Any]


class Record:
    """Plain values under names, given to `write` whenever `save` is called."""

    def __init__(self, write: Callable[[Content], None]) -> None:
        self.content, self._write = Content(not_measured=[]), write

    def save(self) -> None:
        self._write(self.content)

    def skip(self, what: str, why: str) -> None:
        """Something that was to be measured and is not."""
        self.content["not_measured"].append({"what": what, "why": why})
        self.save()


def file_writer(path: Path) -> Callable[[Content], None]:
    """Writes a record to a file: the old one or the new one is there at every moment, never a part of one."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(content: Content) -> None:
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(content, indent=1, default=str) + "\n", "utf-8")
        os.replace(beside, path)

    return write


def merged(before: Content, part: Content) -> Content:
    """A record with a part's content in it: shapes beside each other, what is not measured one after another."""
    both = {**before, **part, "not_measured": [*before["not_measured"], *part["not_measured"]]}
    if "shapes" in both:
        both["shapes"] = {**before.get("shapes", {}), **part.get("shapes", {})}
    return both


class Budget:
    """Seconds for a whole run, shared out to its parts by weight; what a part leaves over, later ones have.

    Args:
        weights: of every part, in any unit.
        least: seconds that a part has whatever its weight, as far as there are so many.
    """

    def __init__(self, seconds: float, weights: dict[str, float], least: dict[str, float] | None = None) -> None:
        self._end, self._weights, self._least = perf_counter() + seconds, dict(weights), least or {}

    def end_of(self, part: str) -> float:
        """When a part that begins now is to end, in the seconds of `perf_counter`."""
        now, rest = perf_counter(), sum(self._weights.values())
        left = max(0.0, self._end - now)
        share = left * self._weights.pop(part) / rest
        return now + min(left, max(share, self._least.get(part, 0.0)))
