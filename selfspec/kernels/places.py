"""The folder in which selfspec keeps files that it makes once per machine."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path

_log = logging.getLogger("selfspec")


def cache_folder() -> Path:
    """The cache folder: $SELFSPEC_CACHE, else a folder in the user's cache folder.

    Raises:
        OSError: the user has no home folder.
    """
    if own := os.environ.get("SELFSPEC_CACHE"):
        return Path(os.path.expanduser(own))
    for name in ("XDG_CACHE_HOME", *(["LOCALAPPDATA"] if os.name == "nt" else [])):
        base = os.environ.get(name, "")
        if os.path.isabs(base):
            return Path(base) / "selfspec"
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise FileNotFoundError(2, "there is no home folder")
    return Path(home) / ".cache" / "selfspec"


def say_unkept(problem: OSError) -> None:
    """Warn that files cannot be kept in the cache folder; once per folder and reason. Everything works without them."""
    try:
        place = str(cache_folder())
    except OSError:
        place = "the user's cache folder"
    _say_unkept(place, problem.strerror or str(problem))


@lru_cache
def _say_unkept(place: str, reason: str) -> None:
    _log.warning(
        "nothing can be kept in %s (%s), so every process measures, compiles or converts again; set SELFSPEC_CACHE to "
        "a folder that you can write to",
        place,
        reason,
    )
