"""Where selfspec keeps what it makes once per machine."""

from __future__ import annotations

import os
from pathlib import Path


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
