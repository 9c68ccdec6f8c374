"""A command that measures cell by cell into a run folder, and goes on there when it was stopped."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Generic, TypeVar

from eval.records import append_line, read_lines, resume

Config = TypeVar("Config")


class Resumable(ABC, Generic[Config]):
    """A run folder, and the cells that it does not hold yet.

    Raises:
        ValueError: the folder holds a run of another configuration.
    """

    may_change: ClassVar[Sequence[str]]  # keys of the configuration that may differ when a run is resumed
    file = "cells.jsonl"  # of the cells, one a line

    def __init__(self, config: Config, folder: str) -> None:
        self.config, self.folder, self._start = config, Path(folder), perf_counter()
        resume(self.folder, config, self.may_change)
        self.lines = read_lines(self.folder / self.file, repair=True)

    @abstractmethod
    def run(self) -> None:
        """Measure what is missing."""

    @abstractmethod
    def finish(self) -> str:
        """Write the tables of what the folder holds; returns them."""

    def keep(self, line: Mapping[str, Any]) -> None:
        """A cell was measured."""
        append_line(self.folder / self.file, dict(line))
        self.lines.append(dict(line))

    def say(self, text: str) -> None:
        """Report on stderr, with the seconds since the start."""
        print(f"[{perf_counter() - self._start:5.0f} s] {text}", file=sys.stderr, flush=True)

    def complete(self) -> int:
        """Run until all is measured or the user interrupts, and print the tables; returns the exit code, 0 or 130."""
        return complete(self, self.folder)


def complete(session: Any, folder: object) -> int:
    """`run` a session, `finish` it, also after an interrupt, and print what that returns; the exit code, 0 or 130."""
    code = 0
    try:
        session.run()
    except KeyboardInterrupt:
        code = 130
    print(session.finish(), end="")
    print(f"{'stopped; run the same command to resume: ' if code else ''}{folder}", file=sys.stderr)
    return code
