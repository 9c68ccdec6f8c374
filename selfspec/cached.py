"""What lies in the cache folder: kinds of files, their sizes, and compiled engines that nobody loads any more."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from selfspec.kernels.machine import cache_folder

DAY = 24 * 3600.0
UNUSED_DAYS = 30  # after which a compiled engine is removed that was not loaded since
Kind = Literal["compiled", "checked", "profiles"]
KINDS: dict[Kind, str] = {
    "compiled": "the engine, compiled for this machine",
    "checked": "results of self-checks of GGUF files",
    "profiles": "costs and acceptance statistics of models on this machine",
}


class Entry(NamedTuple):
    """A file of the cache folder, or a folder that belongs together."""

    kind: str
    path: Path
    size: int
    """Bytes."""
    changed: float
    """Seconds since the epoch, of the newest file in it."""

    def remove(self) -> None:
        """Remove it.

        Raises:
            OSError: it cannot be removed.
        """
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)


def entries(kind: Kind | None = None) -> list[Entry]:
    """What is in the cache folder, of one kind or of all; only what selfspec writes there."""
    return [entry for name in ([kind] if kind else KINDS) for entry in _of_kind(name)]


def _of_kind(kind: str) -> Iterator[Entry]:
    with suppress(OSError):  # there is no folder, or another process removes from it
        for path in sorted((cache_folder() / kind).iterdir()):
            files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
            stats = [one.stat() for one in files] or [path.stat()]
            yield Entry(kind, path, sum(one.st_size for one in stats), max(one.st_mtime for one in stats))


def remove_unused() -> None:
    """Remove compiled engines of other versions that were not loaded for long; a single one stays."""
    found = list(_of_kind("compiled"))
    for entry in found if len(found) > 1 else ():
        if time.time() - entry.changed > UNUSED_DAYS * DAY:
            with suppress(OSError):
                entry.remove()
