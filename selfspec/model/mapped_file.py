"""`MappedFile`: a file in memory whose pages are read when they are touched."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch
from torch import Tensor


class MappedFile:
    """A file mapped copy on write, which torch wants of memory for tensors: the file never changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
        """A contiguous tensor `offset` bytes from the start of the file. It keeps the mapping."""
        with torch.inference_mode(False):  # for calls outside of inference mode, too
            return torch.frombuffer(self._map, dtype=dtype, offset=offset, count=math.prod(shape)).view(shape)

    def check(self) -> None:
        """Raise OSError if the file became shorter. Reading what is missing would end the process with a signal."""
        if self._map.size() < len(self._map):
            raise OSError(f"{self.path} was truncated while it was open; load the model again when it is complete")

    def release(self) -> None:
        """Give the memory of the pages back to the system, which reads them again when they are touched."""
        self._map.madvise(mmap.MADV_DONTNEED)
