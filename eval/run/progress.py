"""What people see while a run goes on: a live table on a terminal, else a line now and then; both on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from eval.run.loop import Outcome
from eval.run.summary import worked_seconds

EVERY_SECONDS = {True: 0.5, False: 5.0}  # on a terminal, and elsewhere: no more often than it is read


class Progress:
    """Counts outcomes and shows them, between calls only: nothing runs beside what is timed.

    Args:
        done: questions by method that an earlier session has answered, or failed to.
    """

    def __init__(
        self, methods: Sequence[str], num_questions: int, done: dict[str, int], file: TextIO | None = None
    ) -> None:
        self.console = Console(file=file or sys.stderr, highlight=False)
        self.methods, self.num_questions = methods, num_questions
        self.done = dict(done)
        self.errors = dict.fromkeys(methods, 0)
        self.tokens, self.seconds = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0.0)
        self.at_start = sum(done.values())
        self.start = self.paced_from = self.last = perf_counter()
        self.is_live = self.console.is_terminal
        self.live = Live(console=self.console, auto_refresh=False) if self.is_live else None

    def __enter__(self) -> Progress:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.live is not None:
            self.live.update(self._table(), refresh=True)
            self.live.stop()

    def begin(self) -> None:
        """The pace, and with it the time still to go, counts from here."""
        self.paced_from = perf_counter()

    def say(self, text: str) -> None:
        self.console.print(Text(f"[{perf_counter() - self.start:5.0f} s] {text}"), soft_wrap=True)

    def __call__(self, method: str, outcome: Outcome) -> None:
        self.done[method] += 1
        if outcome.is_error:
            row = outcome.row
            self.errors[method] += 1
            self.say(f"{method}, question {row['question_id']}: {row['kind']}: {row['sentence']}")
        else:
            choice = outcome.row["choices"][0]
            self.tokens[method] += sum(choice["new_tokens"])
            self.seconds[method] += worked_seconds(outcome.row)
        now, last_one = perf_counter(), self.num_done == self.num_calls
        if now - self.last >= EVERY_SECONDS[self.is_live] or last_one:
            self.last = now
            self._show()

    @property
    def num_calls(self) -> int:
        return self.num_questions * len(self.methods)

    @property
    def num_done(self) -> int:
        return sum(self.done.values())

    def eta(self) -> str:
        """Time still to go, at the pace so far of this session."""
        fresh = self.num_done - self.at_start
        if not fresh:
            return "?"
        left = (perf_counter() - self.paced_from) / fresh * (self.num_calls - self.num_done)
        return f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"

    def _show(self) -> None:
        if self.live is not None:
            self.live.update(self._table(), refresh=True)
            return
        speeds = ", ".join(f"{name} {self._speed(name)}" for name in self.methods)
        self.say(f"{self.num_done} of {self.num_calls} answers, {self.eta()} left; tokens/s: {speeds}")

    def _speed(self, method: str) -> str:
        return f"{self.tokens[method] / self.seconds[method]:.0f}" if self.seconds[method] else "-"

    def _table(self) -> Any:
        table = Table(title=f"{self.num_done} of {self.num_calls} answers, {self.eta()} left", title_justify="left")
        for name in ("method", "questions", "errors", "tokens/s"):
            table.add_column(name, justify="left" if name == "method" else "right")
        for name in self.methods:
            answered = f"{self.done[name]} of {self.num_questions}"
            table.add_row(Text(name), answered, str(self.errors[name] or ""), self._speed(name))
        return table
