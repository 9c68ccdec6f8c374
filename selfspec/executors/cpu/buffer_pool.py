"""`BufferPool`: buffers of earlier calls, kept for later calls of the same size."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfspec.executors.cpu.buffers import Buffers

MAX_BYTES, MAX_BUFFER_BYTES = 1 << 25, 1 << 22  # of all kept buffers together, and of each


class BufferPool:
    """Keeps the buffers of a model that are not in use, by size.

    Allocating new ones takes as long as a token of a small model. Engines in several threads may share a pool: buffers
    belong to one thread from `take` to `give_back`.
    """

    def __init__(self) -> None:
        self._by_size: dict[tuple[int, int, int], list[Buffers]] = {}

    def take(self, size: tuple[int, int, int]) -> Buffers | None:
        """Remove buffers of this size from the pool and return them; None if there are none."""
        try:
            return self._by_size[size].pop()
        except (KeyError, IndexError):
            return None

    def give_back(self, buffers: Buffers) -> None:
        """Keep buffers of at most `MAX_BUFFER_BYTES`. Buffers of the oldest sizes are dropped to stay in the limit."""
        if buffers.num_bytes > MAX_BUFFER_BYTES:
            return
        kept = self._by_size
        while buffers.num_bytes + self.num_bytes > MAX_BYTES:
            kept.pop(next((size for size, own in list(kept.items()) if own), buffers.size), None)
        kept.setdefault(buffers.size, []).append(buffers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all kept buffers."""
        return sum([one.num_bytes for buffers in list(self._by_size.values()) for one in list(buffers)])
