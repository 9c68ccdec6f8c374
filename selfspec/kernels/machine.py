"""The machine: the folder of files that are made once per machine, and the number of compute threads."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from math import ceil
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
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


def warn_not_kept(problem: OSError) -> None:
    """Warn that files cannot be kept in the cache folder; once per folder and reason. Everything works without them."""
    try:
        folder = str(cache_folder())
    except OSError:
        folder = "the user's cache folder"
    _warn_once(folder, problem.strerror or str(problem))


@lru_cache
def _warn_once(folder: str, reason: str) -> None:
    _log.warning(
        "nothing can be kept in %s (%s), so every process measures, compiles or converts again; set SELFSPEC_CACHE to "
        "a folder that you can write to",
        folder,
        reason,
    )


def set_threads(given: int | None) -> None:
    """Set torch's number of threads for this process.

    Args:
        given: the number of threads. None: OMP_NUM_THREADS if it is set, else `usable_cores`.
    """
    if given is None and os.environ.get("OMP_NUM_THREADS"):
        return
    import torch

    torch.set_num_threads(usable_cores() if given is None else given)


def usable_cores() -> int:
    """The number of physical cores that this process may run on, at most its CPU quota."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_core(processor) for processor in usable}
    return max(1, min(len(cores), _quota(len(cores))))


def _core(processor: int) -> str:
    """The core of a hardware thread: all threads of one core return the same name."""
    try:
        return (TOPOLOGY / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text("ascii").strip()
    except OSError:
        return str(processor)


def _quota(default: int) -> int:
    """The CPU quota of the container in cores, rounded up; `default` if there is none."""
    try:
        allowed, period = QUOTA.read_text("ascii").split()
        return default if allowed == "max" else ceil(int(allowed) / int(period))
    except (OSError, ValueError):
        return default
