"""Where selfspec keeps what it makes once per machine."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path

_log = logging.getLogger("selfspec")


def cache_folder() -> Path:
    """The user's cache folder for selfspec; $SELFSPEC_CACHE chooses another place.

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
    """Say that nothing can be kept in the cache folder, once for each folder and reason: everything works without."""
    try:
        place = str(cache_folder())
    except OSError:
        place = "the user's cache folder"
    _say_unkept(place, problem.strerror or str(problem))


@lru_cache
def _say_unkept(place: str, reason: str) -> None:
    _log.warning(
        "nothing can be kept in %s (%s), so every program measures, compiles or converts anew; set SELFSPEC_CACHE to a "
        "folder of yours",
        place,
        reason,
    )
