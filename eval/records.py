"""The run folder: what is asked is written first, then a whole line per answer. The same command goes on after a kill.

config.yaml             the keys that decide what is measured, and a fingerprint of the questions
environment.json        where and with what; sessions that resumed the run beside the first
dirty.diff              how the code differs from its commit, where it does
answers/METHOD.jsonl    a line per question, in Spec-Bench's format with keys of our own
errors.jsonl            a line per question that a method could not answer
rounds.jsonl            on request, a line per question of our own methods; of two for a question the later counts
studies/NAME.json       what a study has measured, or why it cannot
summary.json, report.md, report.html, figures/      of all of the above, written anew at the end of every session
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from eval.answers import Row
from eval.methods import file_name
from eval.run_config import completed
from selfspec.files import write_whole

try:
    import fcntl
except ImportError:  # not on Windows: nothing then keeps two runs out of one folder
    fcntl = None  # type: ignore[assignment]


class FullError(OSError):
    """A file that could not be written, on a full disk for one; what it held before is still there."""

    def __init__(self, path: Path, problem: OSError) -> None:
        super().__init__(f"cannot write {path}: {problem.strerror or problem}; run the same command again to go on")


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line of JSON to a file.

    Raises:
        FullError: it could not be written; what was written of it is taken back.
    """
    line = (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(line)
    except OSError as problem:
        with contextlib.suppress(OSError):
            os.truncate(path, before)
        raise FullError(path, problem) from problem


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


def write_file(path: Path, content: str | bytes) -> None:
    """Write a whole file or, at a kill, none of it.

    Raises:
        FullError: it could not be written; the file is what it was before.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, lambda file: file.write(data))
    except OSError as problem:
        raise FullError(path, problem) from problem


def read_object(path: Path) -> Row:
    """The JSON object in a file; empty where there is no file.

    Raises:
        ValueError: it cannot be read, or is none.
    """
    try:
        content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (OSError, ValueError) as problem:
        raise ValueError(f"cannot read {path}: {problem}") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object")
    return content


class RunFolder:
    """A folder that a run is written into, new or resumed.

    Args:
        config: what decides what is measured; a folder of another is refused. Missing keys have their defaults.

    Raises:
        ValueError: the folder cannot be written, holds another run, or another process is at it.
    """

    def __init__(self, path: Path, config: Row, methods: Sequence[str]) -> None:
        self.path = path
        try:
            (path / "answers").mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as problem:
            raise ValueError(f"cannot write the run folder {str(path)!r}: {problem.strerror}") from problem
        try:
            self._claim(config)
            self.answers = {name: by_question(read_lines(answers_path(path, name), mend=True)) for name in methods}
            self.errors = by_question(read_lines(path / "errors.jsonl", mend=True))
            read_lines(path / "rounds.jsonl", mend=True)
        except BaseException:
            self._lock.close()
            raise

    def _claim(self, config: Row) -> None:
        try:
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise ValueError(f"another run is writing into {str(self.path)!r}; name another output") from problem
        file = self.path / "config.yaml"
        rows = [self.path / "errors.jsonl", *(self.path / "answers").iterdir()]
        if not any(each.exists() and each.stat().st_size for each in rows):
            for name in ("environment.json", "dirty.diff"):  # of a start that came to nothing
                (self.path / name).unlink(missing_ok=True)
            write_file(file, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
            return
        if not file.exists():
            raise ValueError(f"{str(self.path)!r} holds answers but no config.yaml; name another output")
        there, now = completed(yaml.safe_load(file.read_text("utf-8"))), completed(config)
        keys = [key for key in {**now, **there} if now.get(key) != there.get(key)]
        if keys:
            differs = "; ".join(f"{key} {there.get(key)!r}, now {now.get(key)!r}" for key in keys)
            raise ValueError(
                f"{str(self.path)!r} holds a run of another configuration ({differs}); name another output"
            )

    def has(self, method: str, question_id: int | str) -> bool:
        """Whether a method has answered a question, or failed to."""
        return question_id in self.answers[method] or (method, question_id) in self.errors

    def add_answer(self, method: str, row: Row, rounds: Sequence[Sequence[Row]] = ()) -> None:
        """Record an answer; its rounds first, so that a kill never leaves it without them."""
        if any(rounds):
            about = {"method": method, "question_id": row["question_id"]}
            append_line(self.path / "rounds.jsonl", {**about, "turns": list(rounds)})
        append_line(answers_path(self.path, method), row)
        self.answers[method][row["question_id"]] = row

    def add_error(self, row: Row) -> None:
        append_line(self.path / "errors.jsonl", row)
        self.errors[row["method"], row["question_id"]] = row

    def close(self) -> None:
        self._lock.close()


def answers_path(folder: Path, method: str) -> Path:
    return folder / "answers" / f"{file_name(method)}.jsonl"


def by_question(rows: Sequence[Row]) -> dict[Any, Row]:
    """Rows by question id, or by method and id where they are of several; of two the later counts, as in Spec-Bench."""
    return {(row["method"], row["question_id"]) if "kind" in row else row["question_id"]: row for row in rows}
