"""The number of compute threads: one per physical core that this process may use."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


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
