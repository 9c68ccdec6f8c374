"""The run folder: what is asked is written first, then whole lines as they come. A kill at any moment loses at most the
question in hand, a power cut also up to `SETTLE_SECONDS` of answers before it.

    config.yaml         the keys that decide what is measured, and a fingerprint of the questions
    environment.json    where and with what; every resumption beside the start
    dirty.diff          how the code differs from its commit, where it does
    answers/METHOD.jsonl    a line per question, in Spec-Bench's format with keys of our own
    errors.jsonl        a line per question that a method could not answer
    rounds.jsonl        a line per question of our own methods, on request
    studies/NAME.json   what a study has measured, or why it cannot, with its study_questions and study_tokens; measured
                        anew when a session has others, or finds it deleted
    summary.json, report.md     of all of the above, written anew at the end of every session
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml

from eval.run.config import completed
from eval.run.lines import FullError, Lines, Row, read_lines, replace_text
from eval.run.names import file_name

try:
    import fcntl
except ImportError:  # not on Windows: nothing then keeps two runs out of one folder
    fcntl = None  # type: ignore[assignment]

ROUNDS = "rounds.jsonl"
SETTLE_SECONDS = 2.0  # least time between two waits for the disk, as short answers come faster than it takes them


class FolderError(ValueError):
    """A folder that cannot be written, holds another run, or is in use."""


class RunFolder:
    """A folder that a run is written into, new or resumed.

    Lines are written at once, so that a kill loses none, and settled at most every `SETTLE_SECONDS` and at the end: a
    power cut loses those that came less than that after the last settling.

    Args:
        config: what decides what is measured; a folder of another is refused. Missing keys have their defaults.

    Raises:
        FolderError: the folder cannot be written, holds another run, or another process is at it.
    """

    def __init__(self, path: Path, config: Row, methods: Sequence[str], keep_rounds: bool = False) -> None:
        self.path = path
        self._open: dict[str, Lines] = {}
        self._settled = perf_counter()
        try:
            (path / "answers").mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as problem:
            raise FolderError(f"cannot write the run folder {str(path)!r}: {problem.strerror}") from problem
        try:
            self._claim(config)
            self.answers = {name: unique(read_lines(answers_path(path, name), mend=True)) for name in methods}
            self.errors = unique(read_lines(path / "errors.jsonl", mend=True))
            if keep_rounds:
                self._drop_orphans()
        except BaseException:
            self._lock.close()
            raise

    def _claim(self, config: Row) -> None:
        try:
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise FolderError(f"another run is writing into {str(self.path)!r}; name another output") from problem
        file = self.path / "config.yaml"
        is_empty = self._is_empty()
        if not file.exists() and not is_empty:
            raise FolderError(f"{str(self.path)!r} holds answers but no config.yaml; name another output")
        if is_empty:
            for name in ("environment.json", "dirty.diff"):  # of a start that came to nothing
                (self.path / name).unlink(missing_ok=True)
            replace_text(file, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
            return
        there, now = completed(yaml.safe_load(file.read_text("utf-8"))), completed(config)
        keys = [key for key in {**now, **there} if now.get(key) != there.get(key)]
        if keys:
            differs = "; ".join(f"{key} {there.get(key)!r}, now {now.get(key)!r}" for key in keys)
            raise FolderError(
                f"{str(self.path)!r} holds a run of another configuration ({differs}); name another output"
            )

    def _is_empty(self) -> bool:
        rows = [self.path / "errors.jsonl", *(self.path / "answers").iterdir()]
        return not any(file.exists() and file.stat().st_size for file in rows)

    def _drop_orphans(self) -> None:
        """Rounds of a question whose answer was never written: it is asked again."""
        file = self.path / ROUNDS
        rows = read_lines(file, mend=True)
        kept = [row for row in rows if row["question_id"] in self.answers.get(row["method"], {})]
        if len(kept) < len(rows):
            replace_text(file, "".join(json.dumps(row) + "\n" for row in kept))

    def has(self, method: str, question_id: int | str) -> bool:
        """Whether a method has answered a question, or failed to."""
        return question_id in self.answers[method] or (method, question_id) in self.errors

    def add_answer(self, method: str, row: Row, rounds: Sequence[Sequence[Row]] = ()) -> None:
        """Record an answer; its rounds first, so that a kill never leaves it without them."""
        if any(rounds):
            about = {"method": method, "question_id": row["question_id"]}
            self._lines(self.path / ROUNDS).append({**about, "turns": list(rounds)})
        self._append(answers_path(self.path, method), row)
        self.answers[method][row["question_id"]] = row

    def add_error(self, row: Row) -> None:
        self._append(self.path / "errors.jsonl", row)
        self.errors[row["method"], row["question_id"]] = row

    def _append(self, path: Path, row: Row) -> None:
        self._lines(path).append(row)
        if perf_counter() - self._settled > SETTLE_SECONDS:
            self.settle()

    def settle(self) -> None:
        """Have every line on disk.

        Raises:
            FullError: the disk did not take them; what was not settled before is taken back.
        """
        rounds_first = sorted(self._open.values(), key=lambda lines: lines.path.name != ROUNDS)
        try:
            for lines in rounds_first:
                lines.settle()
        except FullError:
            for lines in rounds_first:  # no answer may stay whose rounds are gone
                lines.take_back()
            raise
        self._settled = perf_counter()

    def _lines(self, path: Path) -> Lines:
        if str(path) not in self._open:
            self._open[str(path)] = Lines(path)
        return self._open[str(path)]

    def close(self) -> None:
        """Settle, see there, and let others at the folder whatever comes of that."""
        with contextlib.ExitStack() as last:
            last.callback(self._lock.close)
            for lines in self._open.values():
                last.callback(lines.close)
            last.callback(self._open.clear)
            self.settle()


def answers_path(folder: Path, method: str) -> Path:
    return folder / "answers" / f"{file_name(method)}.jsonl"


def unique(rows: Sequence[Row]) -> dict[Any, Row]:
    """Rows by question id, or by method and id where they are of several; of two the later counts, as in Spec-Bench."""
    return {(row["method"], row["question_id"]) if "kind" in row else row["question_id"]: row for row in rows}
