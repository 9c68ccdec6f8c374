"""The run folder. Rows are appended as whole lines, so a run that was interrupted can be resumed.

config.yaml             the keys that affect the figures, and a hash of the questions
environment.json        machine, versions and model; also those of the sessions that resumed the run
dirty.diff              the difference between the code and its commit, if any
answers/METHOD.jsonl    a line per question, in Spec-Bench's format with additional keys
errors.jsonl            a line per question that a method could not answer
summary.json, report.md, figures/       written again at the end of every session
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
from eval.config import as_record
from eval.methods import file_name
from selfspec.files import write_whole
from train.configuration import as_plain, check, differences

try:
    import fcntl
except ImportError:  # Windows: the folder is then not locked
    fcntl = None  # type: ignore[assignment]


class FullError(OSError):
    """A file could not be written, for example on a full disk; its earlier content is unchanged."""

    def __init__(self, path: Path, problem: OSError) -> None:
        super().__init__(f"cannot write {path}: {problem.strerror or problem}; run the same command again to resume")


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line of JSON to a file.

    Raises:
        FullError: it could not be written; the file is restored.
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


def read_lines(path: Path, repair: bool = False) -> list[Row]:
    """The rows of a file; none where there is no file.

    An incomplete last line is ignored; `repair` also removes it from the file.

    Raises:
        ValueError: a complete line is no JSON object.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if repair and len(whole) < len(content):
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
    """Write a file completely or not at all.

    Raises:
        FullError: it could not be written; the old file is unchanged.
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
        ValueError: the file cannot be read, or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (OSError, ValueError) as problem:
        raise ValueError(f"cannot read {path}: {problem}") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object")
    return content


def resume(folder: Path, config: Any, may_change: Sequence[str]) -> None:
    """Begin a run in a folder, or go on with the one that is there.

    Args:
        may_change: keys that may differ from those of the run so far.

    Raises:
        ValueError: the folder holds a run of another configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "config.yaml"
    old = yaml.safe_load(record.read_text("utf-8")) if record.exists() else as_plain(config)
    differ = differences(old, config, may_change)
    check(not differ, "output", f"a folder of a run with the same {', '.join(differ)}", str(folder))
    write_file(record, yaml.safe_dump(as_plain(config), sort_keys=False))


class RunFolder:
    """A new or resumed run folder, locked until it is closed.

    Args:
        config: the run's record (see `eval.config.as_record`); missing keys have their defaults.

    Raises:
        ValueError: the folder cannot be written, holds a run with another record, or is locked by another process.
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
            self.answers = {name: by_question(read_lines(answers_path(path, name), repair=True)) for name in methods}
            self.errors = by_question(read_lines(path / "errors.jsonl", repair=True))
        except BaseException:
            self._lock.close()
            raise

    def _claim(self, config: Row) -> None:
        """Lock the folder and write its config.yaml, or compare the one that is there."""
        try:
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise ValueError(f"another run is writing into {str(self.path)!r}; name another output") from problem
        file = self.path / "config.yaml"
        rows = [self.path / "errors.jsonl", *(self.path / "answers").iterdir()]
        if not any(each.exists() and each.stat().st_size for each in rows):
            for name in ("environment.json", "dirty.diff"):  # of a session that wrote no row
                (self.path / name).unlink(missing_ok=True)
            write_file(file, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
            return
        if not file.exists():
            raise ValueError(f"{str(self.path)!r} holds answers but no config.yaml; name another output")
        old, new = as_record(yaml.safe_load(file.read_text("utf-8"))), as_record(config)
        keys = [key for key in new if new[key] != old.get(key)]
        if keys:
            differs = "; ".join(f"{key} {old.get(key)!r}, now {new.get(key)!r}" for key in keys)
            raise ValueError(
                f"{str(self.path)!r} holds a run of another configuration ({differs}); name another output"
            )

    def has(self, method: str, question_id: int | str) -> bool:
        """Whether there is an answer or error of a method for a question."""
        return question_id in self.answers[method] or (method, question_id) in self.errors

    def add_answer(self, method: str, row: Row) -> None:
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
    """Answers by question id, errors by method and question id; of duplicates the last counts, as in Spec-Bench."""
    return {(row["method"], row["question_id"]) if "kind" in row else row["question_id"]: row for row in rows}
