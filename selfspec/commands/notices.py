"""How the library's warnings reach a person at the command line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from selfspec.hushed import hushed


class _Lines(logging.Handler):
    """One line each on stderr, and none twice."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        if line not in self._said:
            self._said.add(line)
            print(f"selfspec: {line}", file=sys.stderr)


@contextmanager
def notices(quiet: bool = False) -> Iterator[None]:
    """Show the library's warnings while a command runs, or with `quiet` none of them."""
    log, handler = logging.getLogger("selfspec"), logging.NullHandler() if quiet else _Lines()
    log.addHandler(handler)
    try:
        with hushed():
            yield
    finally:
        log.removeHandler(handler)
