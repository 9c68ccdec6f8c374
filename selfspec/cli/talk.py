"""`Talk`: what a command says on stderr beside its output: the library's notices, and what is waited for."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, Timer
from time import monotonic
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

PATIENCE = 2.0  # seconds of a wait after which it is told
WIDTH = 48  # columns of what is waited for, beside which there is room for how far that is
BETWEEN_LINES = 10.0  # seconds between two lines of one wait where there is no terminal


def wants_colour(stream: TextIO) -> bool:
    """NO_COLOR beats FORCE_COLOR beats whether the stream is a terminal that can."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def same_place(one: TextIO, other: TextIO) -> bool:
    """Whether two streams end up in the same terminal, file or pipe."""
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):  # not a file: somebody has put another object there
        return one.isatty() and other.isatty()


def make_console(stream: TextIO, quiet: bool = False) -> Console:
    """A console in the terminal's own sixteen colours; without colours it writes plain text."""
    colour = wants_colour(stream)
    return Console(
        file=stream,
        quiet=quiet,
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
        width=None if stream.isatty() else 120,
        highlight=False,
    )


class Talk(logging.Handler):
    """While it is entered, the library's warnings are lines on stderr, none of them twice.

    A wait that lasts is told: on a terminal by a line that is rewritten and in the end taken back, elsewhere by lines.
    Nothing moves by itself meanwhile, so that what is being timed is not disturbed.

    Args:
        quiet: say nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(logging.INFO)
        self.console = make_console(sys.stderr, quiet)
        self._said: set[str] = set()
        self._what: str | None = None  # what is waited for
        self._text = ""
        self._is_told = False
        self._last_line = 0.0
        self._live: Live | None = None
        self._guard = RLock()  # a wait is told by a thread of its own

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
        elif record.levelno >= logging.WARNING and line not in self._said:
            self._said.add(line)
            self.console.print(Text(f"selfspec: {line}"), soft_wrap=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around what may take long. Waits within a wait are told in its place."""
        outer = self._what
        timer = Timer(PATIENCE, self._tell)
        timer.daemon = True
        with self._guard:
            self._what, self._text, self._is_told, self._last_line = what, what, False, 0.0
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._guard:
                self._what = outer
                if self._live is not None:
                    self._live.stop()
                    self._live = None

    def progress(self, text: str) -> None:
        """How far the wait in progress has come; told once it is long."""
        with self._guard:
            if self._what is None:
                return
            what = self._what if len(self._what) <= WIDTH else self._what[: WIDTH - 1] + "…"
            self._text = f"{what}: {text}"
            if self._is_told:
                self._show()

    def _tell(self) -> None:
        with self._guard:
            if self._what is not None:
                self._is_told = True
                self._show()

    def _show(self) -> None:
        if not self.console.is_terminal:
            if not self._last_line or monotonic() - self._last_line > BETWEEN_LINES:
                self._last_line = monotonic()
                self.console.print(Text(f"{self._text} ..."), soft_wrap=True)
        elif self._live is None:
            shown = Text(self._text, "dim", no_wrap=True, overflow="ellipsis")
            self._live = Live(shown, console=self.console, auto_refresh=False, transient=True, redirect_stdout=False)
            self._live.start(refresh=True)
        else:
            self._live.update(Text(self._text, "dim", no_wrap=True, overflow="ellipsis"), refresh=True)
