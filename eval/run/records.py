"""The run folder: what is asked is written first, then whole lines as they come, so that a kill at any moment loses at
most the question in hand.

    config.yaml         the keys that decide what is measured, and a fingerprint of the questions
    environment.json    where and with what; every resumption beside the start
    dirty.diff          how the code differs from its commit, where it does
    answers/METHOD.jsonl    a line per question, in Spec-Bench's format with keys of our own
    errors.jsonl        a line per question that a method could not answer
    rounds.jsonl        a line per question of our own methods, on request
    studies/NAME.json   what a study has measured, or why it cannot; delete the file to have it measured anew
    summary.json, report.md     of all of the above, written anew at the end of every session
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from eval.run.names import file_name

try:
    import fcntl
except ImportError:  # not on Windows: nothing then keeps two runs out of one folder
    fcntl = None  # type: ignore[assignment]

Row = dict[str, Any]


class FolderError(ValueError):
    """A folder that cannot be written, holds another run, or is in use."""


class FullError(OSError):
    """A line or file that could not be written, on a full disk for one; the folder is as it was before."""


class Lines:
    """A file that lines of JSON are appended to; each is on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("ab", buffering=0)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a line.

        Raises:
            FullError: it could not be written, on a full disk for one; what was written of it is taken back.
        """
        rest = memoryview((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
        before = os.fstat(self.file.fileno()).st_size
        try:
            while rest:
                rest = rest[os.write(self.file.fileno(), rest) :]
            os.fsync(self.file.fileno())
        except OSError as problem:
            with contextlib.suppress(OSError):
                self.file.truncate(before)
            raise _full(self.path, problem) from problem

    def close(self) -> None:
        self.file.close()


def read_lines(path: Path, mend: bool = False) -> list[Row]:
    """The rows of a file; none where there is no file.

    What follows the last line's end is what a kill has left of a row: it is left out, and with `mend` cut off.

    Raises:
        ValueError: a whole line is no JSON object.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if mend and len(whole) < len(content):
        os.truncate(path, len(whole))
    rows = []
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError as problem:
            raise ValueError(f"{path}, line {number}: not JSON ({problem})") from problem
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        rows.append(row)
    return rows


def replace_text(path: Path, text: str) -> None:
    """Write a whole file or, when killed, none of it.

    Raises:
        FullError: it could not be written.
    """
    beside = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(exist_ok=True)
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as problem:
        raise _full(path, problem) from problem


def _full(path: Path, problem: OSError) -> FullError:
    return FullError(f"cannot write {path}: {problem.strerror or problem}; run the same command again to go on")


class RunFolder:
    """A folder that a run is written into, new or resumed.

    Args:
        config: what decides what is measured; a folder of another is refused.

    Raises:
        FolderError: the folder cannot be written, holds another run, or another process is at it.
    """

    def __init__(self, path: Path, config: Row, methods: Sequence[str], keep_rounds: bool = False) -> None:
        self.path = path
        self._open: dict[str, Lines] = {}
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
        there = yaml.safe_load(file.read_text("utf-8"))
        keys = [key for key in {**config, **there} if config.get(key) != there.get(key)]
        if keys:
            differs = "; ".join(f"{key} {there.get(key)!r}, now {config.get(key)!r}" for key in keys)
            raise FolderError(
                f"{str(self.path)!r} holds a run of another configuration ({differs}); name another output"
            )

    def _is_empty(self) -> bool:
        rows = [self.path / "errors.jsonl", *(self.path / "answers").iterdir()]
        return not any(file.exists() and file.stat().st_size for file in rows)

    def _drop_orphans(self) -> None:
        """Rounds of a question whose answer was never written: it is asked again."""
        file = self.path / "rounds.jsonl"
        rows = read_lines(file, mend=True)
        kept = [row for row in rows if row["question_id"] in self.answers.get(row["method"], {})]
        if len(kept) < len(rows):
            replace_text(file, "".join(json.dumps(row) + "\n" for row in kept))

    def has(self, method: str, question_id: int | str) -> bool:
        """Whether a method has answered a question, or failed to."""
        return question_id in self.answers[method] or (method, question_id) in self.errors

    def add_answer(self, method: str, row: Row, rounds: Sequence[Sequence[Row]] = ()) -> None:
        """Record an answer; its rounds first, so that an answer is never without them."""
        if any(rounds):
            about = {"method": method, "question_id": row["question_id"]}
            self._lines(self.path / "rounds.jsonl").append({**about, "turns": list(rounds)})
        self._lines(answers_path(self.path, method)).append(row)
        self.answers[method][row["question_id"]] = row

    def add_error(self, row: Row) -> None:
        self._lines(self.path / "errors.jsonl").append(row)
        self.errors[row["method"], row["question_id"]] = row

    def _lines(self, path: Path) -> Lines:
        if str(path) not in self._open:
            self._open[str(path)] = Lines(path)
        return self._open[str(path)]

    def close(self) -> None:
        for lines in self._open.values():
            lines.close()
        self._open.clear()
        self._lock.close()


def answers_path(folder: Path, method: str) -> Path:
    return folder / "answers" / f"{file_name(method)}.jsonl"


def unique(rows: Sequence[Row]) -> dict[Any, Row]:
    """Rows by question id, or by method and id where they are of several; of two the later counts, as in Spec-Bench."""
    return {(row["method"], row["question_id"]) if "kind" in row else row["question_id"]: row for row in rows}
