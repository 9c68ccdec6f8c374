"""What people see while a run goes on: a line now and then on standard error, between calls only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import perf_counter

from eval.answers import Row, worked_seconds

EVERY = 5.0  # seconds between two lines about answers


class Progress:
    """Counts answers and says how far the run is; nothing of it runs beside what is timed.

    Args:
        done: questions by method that an earlier session has answered, or failed to.
    """

    def __init__(self, methods: Sequence[str], num_questions: int, done: dict[str, int]) -> None:
        self.num_calls, self.num_done = num_questions * len(methods), sum(done.values())
        self.num_fresh = 0  # answers of this session
        self.tokens, self.seconds = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0.0)
        self.start = self.paced_from = self.last = perf_counter()

    def say(self, text: str) -> None:
        print(f"[{perf_counter() - self.start:5.0f} s] {text}", file=sys.stderr, flush=True)

    def begin(self) -> None:
        """The pace, and with it the time still to go, counts from here."""
        self.paced_from = perf_counter()

    def __call__(self, method: str, row: Row) -> None:
        self.num_done, self.num_fresh = self.num_done + 1, self.num_fresh + 1
        if "kind" in row:
            self.say(f"{method}, question {row['question_id']}: {row['kind']}: {row['sentence']}")
        else:
            self.tokens[method] += sum(row["choices"][0]["new_tokens"])
            self.seconds[method] += worked_seconds(row)
        now = perf_counter()
        if now - self.last >= EVERY or self.num_done == self.num_calls:
            self.last = now
            left = (now - self.paced_from) / self.num_fresh * (self.num_calls - self.num_done)
            pairs = [(name, seconds) for name, seconds in self.seconds.items() if seconds]
            speeds = ", ".join(f"{name} {self.tokens[name] / seconds:.0f}" for name, seconds in pairs)
            self.say(f"{self.num_done} of {self.num_calls} answers, {left:.0f} s left; tokens/s: {speeds or '-'}")
