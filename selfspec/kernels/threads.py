"""How many threads to compute with: one per physical core that this process may use."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def set_threads(given: int | None) -> None:
    """Tell torch, for this process; a count named by OMP_NUM_THREADS stands unless one is given."""
    if given is None and os.environ.get("OMP_NUM_THREADS"):
        return
    import torch

    torch.set_num_threads(usable_cores() if given is None else given)


def usable_cores() -> int:
    """Physical cores of the processors this process may run on, no more than its quota of their time."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_core(processor) for processor in usable}
    return max(1, min(len(cores), _quota(len(cores))))


def _core(processor: int) -> str:
    """The hardware threads of one core have the same name."""
    try:
        return (TOPOLOGY / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text("ascii").strip()
    except OSError:
        return str(processor)


def _quota(most: int) -> int:
    """Cores' worth of time that a container may have."""
    try:
        allowed, period = QUOTA.read_text("ascii").split()
        return most if allowed == "max" else ceil(int(allowed) / int(period))
    except (OSError, ValueError):
        return most
