"""`Sample`: a text that a model wrote after a prompt. `Written`: what it wrote, in a file from which a run goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Sample(NamedTuple):
    """A text whose first `num_prompt` tokens are the prompt; the model wrote the others."""

    tokens: list[int]
    num_prompt: int

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.num_prompt]

    @property
    def positions(self) -> range:
        """The positions whose next token the model wrote."""
        return range(self.num_prompt - 1, len(self.tokens) - 1)


def count_positions(samples: Sequence[Sample]) -> int:
    return sum(len(sample.positions) for sample in samples)


class Task(NamedTuple):
    """A prompt to continue. The output depends on these fields and the model alone."""

    prompt: tuple[int, ...]
    limit: int  # new tokens, at most
    temperature: float
    seed: int


class Written:
    """What a model wrote so far, by task; every output is in the file as soon as it is added.

    The first output replaces a file of another model. A line that a killed run left unfinished does not count.

    Args:
        file: None: nothing is kept.
        model: identifies the model.

    Raises:
        OSError: the file cannot be read or, in `add`, written.
    """

    def __init__(self, file: Path | None, model: str) -> None:
        self._file, self._known, self._kept = file, dict[Task, list[int]](), 0
        self._head = json.dumps({"model": model}).encode() + b"\n"
        try:
            content = file.read_bytes() if file is not None and file.is_file() else b""
            if content.startswith(self._head):
                self._kept = content.rindex(b"\n") + 1
                for line in content[len(self._head) : self._kept].splitlines():
                    prompt, count, temperature, seed, tokens = json.loads(line)
                    self._known[Task(tuple(prompt), count, temperature, seed)] = tokens
        except (OSError, ValueError) as problem:
            raise OSError(f"cannot read the texts in {file}: {problem}; remove it") from problem

    def get(self, task: Task) -> list[int]:
        """The output of a task; [] if it is not written yet, or empty."""
        return self._known.get(task) or []

    def missing(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks without an output, each once."""
        return [task for task in dict.fromkeys(tasks) if task not in self._known]

    def add(self, task: Task, tokens: Sequence[int]) -> None:
        """Keep the output of a task."""
        self._known[task] = list(tokens)
        if self._file is None:
            return
        line = json.dumps([*task, list(tokens)]).encode() + b"\n"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as opened:
                opened.truncate(self._kept)
                self._kept += opened.write(line if self._kept else self._head + line)
        except OSError as problem:
            raise OSError(f"cannot write {self._file}: {problem}; free space and run it again") from problem
