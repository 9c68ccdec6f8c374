"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

Result = TypeVar("Result")


def write_whole(file: Path, write: Callable[[BinaryIO], Result]) -> Result:
    """Call `write` with a new file in the same folder, then rename that file to `file`; return what `write` returns.

    Readers see the old file or the new one. Of several writers, the last one wins.

    Raises:
        OSError: the folder or the file cannot be written; an earlier `file` is unchanged.
    """
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with unfinished.open("xb+") as stream:
            result = write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return result
