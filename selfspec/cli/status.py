"""`StatusConsole`: what a command says on stderr: the library's warnings, and what is waited for."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

BETWEEN_LINES = 10.0  # seconds between two lines of one wait where there is no terminal


def make_console(stream: TextIO, quiet: bool = False) -> Console:
    """A console in the terminal's own sixteen colours. NO_COLOR beats FORCE_COLOR beats whether it is a terminal."""
    forced, is_dumb = bool(os.environ.get("FORCE_COLOR")), os.environ.get("TERM") in ("dumb", "unknown")
    coloured = not os.environ.get("NO_COLOR") and (forced or (stream.isatty() and not is_dumb))
    return Console(
        file=stream,
        quiet=quiet,
        force_terminal=coloured,
        color_system="standard" if coloured else None,
        width=None if stream.isatty() else 120,
        highlight=False,
        markup=False,
    )


class StatusConsole(logging.Handler):
    """Shows warnings of the library, none of them twice, and how far a wait has come.

    On a terminal, a wait is a line that is rewritten and in the end taken back; elsewhere, waits of more than ten
    seconds are lines. Nothing moves by itself, so that what is being timed is not disturbed.

    Args:
        quiet: show nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(logging.INFO)
        self.console = make_console(sys.stderr, quiet)
        self._warned: set[str] = set()
        self._live: Live | None = None
        self._task, self._line_at = Text(), 0.0

    def __enter__(self) -> Self:
        log = logging.getLogger("selfspec")
        self._level = log.level
        log.addHandler(self)
        log.setLevel(min(log.getEffectiveLevel(), logging.INFO))  # of progress
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        log = logging.getLogger("selfspec")
        log.removeHandler(self)
        log.setLevel(self._level)

    def emit(self, record: logging.LogRecord) -> None:
        """A warning is a line of its own; progress, which the library marks as such, belongs to the wait."""
        line = " ".join(record.getMessage().split())
        if getattr(record, "is_progress", False):
            self.progress(line)
        elif record.levelno >= logging.WARNING and line not in self._warned:
            self._warned.add(line)
            self.say(f"selfspec: {line}", "")
        elif getattr(record, "is_told", False) or (
            record.name.startswith("selfspec.serving") and record.levelno == logging.INFO  # answers, and prompts
        ):
            self.say(line)

    def say(self, line: Any, style: str = "dim") -> None:
        """A line."""
        self.console.print(line, style=style, soft_wrap=True)

    @contextmanager
    def waiting(self, task: str) -> Iterator[None]:
        """Around what may take long."""
        self._task, self._line_at = Text(task), monotonic()
        self._task.truncate(48, overflow="ellipsis")  # so that there is space for how far it has come
        live = Live(self._line(task), console=self.console, auto_refresh=False, transient=True, redirect_stdout=False)
        with live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def progress(self, text: str) -> None:
        """How far the wait has come."""
        if self._live is None:
            return
        line = f"{self._task.plain}: {text}"
        self._live.update(self._line(line), refresh=True)
        if not self.console.is_terminal and monotonic() - self._line_at > BETWEEN_LINES:
            self._line_at = monotonic()
            self.say(f"{line} ...", "")

    def _line(self, text: str) -> Text:
        return Text(text, "dim", no_wrap=True, overflow="ellipsis")
