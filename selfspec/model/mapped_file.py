"""`MappedFile`: a file in memory whose pages are read when they are touched."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGEMAP = "/proc/self/pagemap"  # of Linux: 8 bytes of flags per page
PRESENT, OF_FILE = 62, 61  # flags: the page is in memory or swap (two bits from 62 on), and is the file's own


class MappedFile:
    """A file mapped copy on write: edits of its tensors stay in this process, and the file never changes."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._start = self.tensor(torch.uint8, 0, (1,)).data_ptr()

    def tensor(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
        """A contiguous tensor `offset` bytes from the start of the file. It keeps the mapping."""
        with torch.inference_mode(False):  # for calls outside of inference mode, too
            return torch.frombuffer(self._map, dtype=dtype, offset=offset, count=math.prod(shape)).view(shape)

    @property
    def is_truncated(self) -> bool:
        """Whether the file became shorter. Reading what is missing would end the process with the signal SIGBUS."""
        return self._map.size() < len(self._map)

    def pages(self, offset: int, size: int) -> slice:
        """The pages of some bytes, as indices into `edited_pages`."""
        return slice(offset // mmap.PAGESIZE, -(-(offset + size) // mmap.PAGESIZE))

    def edited_pages(self) -> NDArray[np.bool_] | None:
        """Whether each page was written to, by whatever means; None where the system does not tell.

        The first write to a page replaces it by a copy of its own, which is no page of the file any more.
        """
        count = -(-len(self._map) // mmap.PAGESIZE)
        try:
            with open(PAGEMAP, "rb") as pagemap:
                pagemap.seek(self._start // mmap.PAGESIZE * 8)
                flags = np.frombuffer(pagemap.read(count * 8), np.uint64)
        except OSError:
            return None
        if len(flags) != count:
            return None
        return (flags >> np.uint64(PRESENT) != 0) & (flags >> np.uint64(OF_FILE) & np.uint64(1) == 0)

    def release(self) -> None:
        """Give the memory of the pages back to the system, which reads them again when they are touched.

        Nothing is released if a page was edited, or if the system does not tell. No other thread may write meanwhile.
        """
        edited = self.edited_pages()
        if edited is not None and not edited.any():
            self._map.madvise(mmap.MADV_DONTNEED)
