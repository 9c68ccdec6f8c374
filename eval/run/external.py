"""Any other engine as a method: a command that reads one JSON question per line and writes one JSON answer per line.

A question has `question_id`, `turn` (0 for the first), `prompt` (text, after any chat template), `tokens` (its ids),
`max_new_tokens`, `temperature`, `seed` and `eos_token_ids` (empty: write on to the length). The answer has `tokens`
(new ids) or `text`, and may have `seconds` (its own clock; else the harness's round trip counts) and `accept_lengths`
(tokens per step, with the target's own); or it is `{"error": "a sentence"}`. One answer per question, in order,
flushed.
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

from eval.run.questions import encoded
from eval.run.turns import Failure, Prompt, Turn


class External:
    """A command, started at the first question and again after it crashed or was killed at the time limit.

    Args:
        tokenizer: for answers that are text.
        log: file that gets what the command writes to stderr.
        limit: seconds per question, the command's start included at its first.
    """

    def __init__(
        self,
        name: str,
        command: str,
        tokenizer: Any,
        log: Path,
        *,
        temperature: float = 0.0,
        eos: frozenset[int] = frozenset(),
        limit: float = 300.0,
    ) -> None:
        self.name, self.command, self.tokenizer = name, shlex.split(command), tokenizer
        self.log, self.limit = log, limit
        self.shared = {"temperature": temperature, "eos_token_ids": sorted(eos)}
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, prompt: Prompt) -> Turn:
        line = json.dumps(
            {
                "question_id": prompt.question_id,
                "turn": prompt.turn,
                "prompt": prompt.text,
                "tokens": prompt.ids,
                "max_new_tokens": prompt.max_new_tokens,
                "seed": prompt.seed,
                **self.shared,
            }
        )
        start = perf_counter()
        reply = self._ask(line)
        return self._turn(reply, perf_counter() - start)

    def _ask(self, line: str) -> str:
        start = perf_counter()
        process = self.process if self.process is not None and self.process.poll() is None else self._start()
        threading.Thread(target=_write, args=(process, line), daemon=True).start()  # a full pipe must not hold us up
        try:
            reply = self.lines.get(timeout=self.limit)
        except queue.Empty:
            self.close()
            took = perf_counter() - start
            raise Failure("timeout", f"killed after {self.limit:g} s without an answer", took) from None
        if not reply:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)  # its output is closed already: it is ending
            code = process.poll()
            self.close()
            took = perf_counter() - start
            raise Failure("crash", f"the command ended with exit code {code}; see {self.log.name}", took)
        return reply

    def _start(self) -> subprocess.Popen[str]:
        self.close()
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "encoding": "utf-8",
            "errors": "replace",
        }
        try:
            with self.log.open("ab") as log:  # in a session of its own, so that Ctrl-C is ours alone to handle
                self.process = subprocess.Popen(self.command, stderr=log, start_new_session=True, **pipes)
        except OSError as problem:
            raise Failure("crash", f"cannot start {shlex.join(self.command)}: {problem}") from problem
        self.lines = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self.process, self.lines), daemon=True).start()
        return self.process

    def _turn(self, line: str, asked: float) -> Turn:
        try:
            reply: Any = json.loads(line)
            if "error" in reply:
                raise Failure("error", str(reply["error"]), asked)
            text, tokens = reply.get("text"), reply.get("tokens")
            tokens = (
                list(encoded(self.tokenizer, text, False)) if tokens is None else [_whole(token) for token in tokens]
            )
            lengths = reply.get("accept_lengths")
            seconds = float(reply.get("seconds", asked))
            steps = None if lengths is None else [_whole(n) for n in lengths]
        except (ValueError, TypeError, AttributeError) as problem:
            raise Failure("error", f"no valid answer: {line.strip()[:80]!r} ({problem})", asked) from problem
        if not (isfinite(seconds) and 0 < seconds <= asked):
            raise Failure("error", f"it reports {seconds:g} s for a question that it had for {asked:.6f} s", asked)
        return Turn(tokens, seconds, text=text, accept_lengths=steps, asked_seconds=asked)

    def close(self) -> None:
        """End the command, with whatever it has started itself."""
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
    with contextlib.suppress(OSError, ValueError):  # it has ended, which the reading side will notice
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    """Lines as they come, and an empty one at the end."""
    assert process.stdout is not None
    with contextlib.suppress(OSError, ValueError):  # closed under its feet
        for line in process.stdout:
            lines.put(line)
    lines.put("")


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number, got {value!r}")
    return value
