"""Memory in large pages. In small pages, reading weights spends much time on address translation."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import torch
from torch import Tensor

LARGE = 2 << 20  # bytes of a large page
LINE = 64  # bytes of a cache line; every tensor begins at one
CHUNK = 32 << 20  # minimum bytes per allocation from the system


class LargePageAllocator:
    """Allocates tensors of zeros, contiguously, in memory for which it requests large pages.

    If the system has no large pages, the pages are small. A chunk of memory is freed with the last of its tensors.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of zeros. It shares no cache line with another tensor."""
        count = -(-torch.Size(shape).numel() * dtype.itemsize // 4)  # as float32
        padded = -(-count * 4 // LINE) * LINE // 4
        if padded > len(self._chunk):
            self._chunk = _chunk(max(CHUNK, 4 * padded))
        made, self._chunk = self._chunk[:count], self._chunk[padded:]
        return made.view(dtype)[: torch.Size(shape).numel()].view(shape)


def _chunk(size: int) -> Tensor:
    """float32 zeros of `size` bytes that begin at a large page."""
    private = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}  # shared pages stay small
    memory = mmap.mmap(-1, size + LARGE, **private)
    whole = torch.frombuffer(memory, dtype=torch.float32)
    start = -whole.data_ptr() % LARGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel was built without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return whole[start // 4 : (start + size) // 4]
