"""Memory in large pages: reading weights in small ones, a processor spends much of its time finding where they are."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import torch
from torch import Tensor

LARGE = 2 << 20  # bytes of a large page
LINE = 64  # and of a cache line, where every tensor begins
CHUNK = 32 << 20  # bytes asked of the system at a time, at least


class LargePageAllocator:
    """Hands out float32 tensors of zeros, one after another in memory that the system is asked to back by large pages.

    Where it has none to give, or knows none, the pages are small ones. The memory is given back with the last tensor.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0)

    def zeros(self, *shape: int) -> Tensor:
        """A tensor of zeros; its rest of a cache line is its own too."""
        count = torch.Size(shape).numel()
        taken = -(-count * 4 // LINE) * LINE // 4
        if taken > len(self._chunk):
            self._chunk = _chunk(max(CHUNK, 4 * taken))
        made, self._chunk = self._chunk[:count], self._chunk[taken:]
        return made.view(shape)


def _chunk(size: int) -> Tensor:
    """float32 zeros of `size` bytes, whose first stands where a large page begins."""
    private = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}  # shared ones stay small
    memory = mmap.mmap(-1, size + LARGE, **private)
    whole = torch.frombuffer(memory, dtype=torch.float32)
    start = -whole.data_ptr() % LARGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return whole[start // 4 : (start + size) // 4]
