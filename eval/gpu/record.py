"""A record that is on disk at every moment, whole: a run that is cut short keeps what it had."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any


class Record:
    """Plain values under names, written again whenever `save` is called: the old file or the new one, never a part."""

    def __init__(self, path: Path) -> None:
        self.path, self.content = path, dict[str, Any](complete=False, not_measured=[])
        path.parent.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.content, indent=1, default=str) + "\n", "utf-8")
        os.replace(beside, self.path)

    def skip(self, what: str, why: str) -> None:
        """Something that was to be measured and is not."""
        self.content["not_measured"].append({"what": what, "why": why})
        self.save()


class Budget:
    """Seconds for a whole run, shared out to its parts by weight; what a part leaves over, later ones have."""

    def __init__(self, seconds: float, weights: dict[str, float]) -> None:
        self._end, self._weights = perf_counter() + seconds, dict(weights)
        self._part_end = self._end

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        rest = sum(self._weights.values())
        share = self._weights.pop(name) / rest
        self._part_end = perf_counter() + max(0.0, self._end - perf_counter()) * share
        try:
            yield
        finally:
            self._part_end = self._end

    @property
    def left(self) -> float:
        """Seconds left to the part."""
        return self._part_end - perf_counter()
