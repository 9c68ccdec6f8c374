"""Files of JSON lines and whole files, written so that a kill leaves nothing half-written."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class FullError(OSError):
    """A line or file that could not be written, on a full disk for one; the folder has whole lines only, and lacks no
    more of them than a power cut would have taken."""


class Lines:
    """A file that lines of JSON are appended to; a kill loses none that `append` has returned from, and a power cut
    none before the last `settle`."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("ab", buffering=0)
        self.settled = os.fstat(self.file.fileno()).st_size  # bytes

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
        except OSError as problem:
            with contextlib.suppress(OSError):
                self.file.truncate(before)
            raise _full(self.path, problem) from problem

    def settle(self) -> None:
        """Have every line on disk.

        Raises:
            FullError: the disk did not take them; those since the last time are taken back.
        """
        size = os.fstat(self.file.fileno()).st_size
        try:
            if size > self.settled:
                os.fsync(self.file.fileno())
        except OSError as problem:
            self.take_back()
            raise _full(self.path, problem) from problem
        self.settled = size

    def take_back(self) -> None:
        """Remove what is not known to be on disk: after a failed `fsync` nobody can tell what is."""
        with contextlib.suppress(OSError):
            self.file.truncate(self.settled)

    def close(self) -> None:
        """Settle, see there, and close whatever comes of that."""
        try:
            self.settle()
        finally:
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
    """Write a whole file or, at a kill or power cut, none of it.

    Raises:
        FullError: it could not be written; the file is what it was before.
    """
    replace_bytes(path, text.encode("utf-8"))


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a whole file or, at a kill or power cut, none of it.

    Raises:
        FullError: it could not be written; the file is what it was before.
    """
    beside = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(exist_ok=True)
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as problem:
        raise _full(path, problem) from problem
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)  # it is still there when the write failed


def _full(path: Path, problem: OSError) -> FullError:
    return FullError(f"cannot write {path}: {problem.strerror or problem}; run the same command again to go on")
