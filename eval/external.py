"""Any other engine as a method: a command that reads one JSON question per line and writes one JSON answer per line.

A question has `question_id`, `turn` (0 for the first), `prompt` (text, after any chat template), `tokens` (its ids),
`max_new_tokens`, `temperature`, `seed` and `eos_token_ids` (empty: always write max_new_tokens).

The answer has `tokens` (new ids) or `text`, or it is `{"error": "a sentence"}`. It may have `seconds` (by the command's
own clock; default: the harness's round trip), `accept_lengths` (tokens per step, with the target's own; as in
Spec-Bench, the last step may have made more tokens than are kept), and the question's `question_id` and `turn`, which
are then checked.

The command writes one answer per question, in order, flushed, and nothing else on standard output. An invalid answer
becomes an error row, and the command is restarted for the next question.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

from eval.answers import Failure, Method, Prompt, Turn
from eval.questions import encoded

SPARE = 8  # additional tokens allowed in a text: one that ends inside a letter has more when it is encoded again


class External(Method):
    """A command, started at the first question, and again after a crash, a timeout or an invalid answer.

    After an invalid answer its next line may belong to the old question, so the process is killed.

    Args:
        tokenizer: encodes answers that are text.
        log: file for the command's standard error.
        limit: seconds per question; the first includes the start of the command.
    """

    def __init__(
        self,
        name: str,
        command: str,
        tokenizer: Any,
        log: Path,
        eos: frozenset[int] = frozenset(),
        temperature: float = 0.0,
        limit: float = 300.0,
    ) -> None:
        self.name, self.command, self.tokenizer = name, shlex.split(command), tokenizer
        self.log, self.limit = log, limit
        self.shared = {"temperature": temperature, "eos_token_ids": sorted(eos)}
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, prompt: Prompt) -> Turn:
        about = {"question_id": prompt.question_id, "turn": prompt.turn, "prompt": prompt.text, "tokens": prompt.ids}
        limits = {"max_new_tokens": prompt.max_new_tokens, "seed": prompt.seed, **self.shared}
        line = json.dumps({**about, **limits})
        start = perf_counter()
        reply = self._ask(line)
        return self._turn(prompt, reply, perf_counter() - start)

    def _ask(self, line: str) -> str:
        """Send a question; returns the line of the answer."""
        start = perf_counter()
        self._check_no_line(start)
        process = self.process if self.process is not None and self.process.poll() is None else self._start()
        threading.Thread(target=_write, args=(process, line), daemon=True).start()  # a full pipe must not block
        try:
            reply = self.lines.get(timeout=self.limit)
        except queue.Empty:
            self.close()
            took = perf_counter() - start
            raise Failure("timeout", f"killed after {self.limit:g} s without an answer", took) from None
        if not reply:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)  # its output is closed, so it is ending
            code = process.poll()
            self.close()
            took = perf_counter() - start
            raise Failure("crash", f"the command ended with exit code {code}; see {self.log.name}", took)
        self._check_no_line(start)
        return reply

    def _check_no_line(self, start: float) -> None:
        """Raise `Failure` if there is an additional line, which would be read as the next question's answer."""
        if self.process is None or self.lines.empty():
            return
        line = self.lines.get()
        if not line:
            self.lines.put(line)  # the process has ended; the next question reports it
            return
        self.close()
        sentence = f"it wrote a line that no question asked for: {line.strip()[:80]!r}; write one line per question"
        raise Failure("error", sentence, perf_counter() - start)

    def _start(self) -> subprocess.Popen[str]:
        self.close()
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        pipes |= {"encoding": "utf-8", "errors": "replace"}
        try:
            with self.log.open("ab") as log:  # a new session does not receive Ctrl-C
                self.process = subprocess.Popen(self.command, stderr=log, start_new_session=True, **pipes)
        except OSError as problem:
            raise Failure("crash", f"cannot start {shlex.join(self.command)}: {problem}") from problem
        self.lines = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self.process, self.lines), daemon=True).start()
        return self.process

    def _turn(self, prompt: Prompt, line: str, round_trip: float) -> Turn:
        """Parse an answer; `round_trip` are its seconds."""
        try:
            reply: Any = json.loads(line)
            _check_question(prompt, reply)
            if "error" in reply:
                sentence = " ".join(str(reply["error"]).split())
                raise Failure("error", sentence.encode("utf-8", "backslashreplace").decode(), round_trip)
            text, tokens, lengths = (reply.get(key) for key in ("text", "tokens", "accept_lengths"))
            is_text = tokens is None
            tokens = list(encoded(self.tokenizer, text, False)) if is_text else [_whole(token) for token in tokens]
            seconds = float(reply.get("seconds", round_trip))
            steps = None if lengths is None else [_whole(n) for n in lengths]
            _check_number(len(tokens), prompt.max_new_tokens, steps, is_text)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
            self.close()  # the line may not be the answer, which may follow
            raise Failure("error", f"no valid answer: {line.strip()[:80]!r} ({problem})", round_trip) from problem
        if not (isfinite(seconds) and 0 < seconds <= round_trip):
            self.close()
            raise Failure("error", f"it reports {seconds:g} s, but the round trip took {round_trip:.6f} s", round_trip)
        return Turn(tokens, seconds, text=text, accept_lengths=steps, asked_seconds=round_trip)

    def close(self) -> None:
        """Kill the command and the processes that it has started."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def _write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # the process has ended; the reading thread reports it
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    """Put every line into the queue, and an empty one at the end."""
    assert process.stdout is not None
    with contextlib.suppress(OSError, ValueError):  # closed by `close`
        for line in process.stdout:
            lines.put(line)
    lines.put("")


def _check_question(prompt: Prompt, reply: dict[str, Any]) -> None:
    for key, expected in (("question_id", prompt.question_id), ("turn", prompt.turn)):
        if reply.get(key, expected) != expected:
            raise ValueError(f"its {key} is {reply[key]!r}, that of the question {expected!r}")


def _check_number(num_tokens: int, limit: int, steps: list[int] | None, is_text: bool) -> None:
    if num_tokens > limit + SPARE * is_text:
        raise ValueError(f"{num_tokens} tokens, but max_new_tokens is {limit}")
    if steps is None or is_text:  # our tokenizer may split a text into other tokens than the command has counted
        return
    if not sum(steps[:-1]) <= num_tokens <= sum(steps):
        raise ValueError(f"accept_lengths add up to {sum(steps)}, but it has {num_tokens} tokens")


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number, got {value!r}")
    return value
