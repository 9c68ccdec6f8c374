"""`Spare`: buffers of a model that are in nobody's use."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

MOST_BYTES, MOST_KEPT_BYTES = 1 << 25, 1 << 22  # of the buffers that a model keeps, and of each


class Sized(Protocol):
    """B, which fit what needs that very size."""

    @property
    def size(self) -> tuple[int, int, int]: ...
    @property
    def num_bytes(self) -> int: ...


B = TypeVar("B", bound=Sized)


class Spare(Generic[B]):
    """They are kept since new memory takes as long as a token of a small model. Engines of a model may run in several
    threads, each with buffers that are its own until it gives them back."""

    def __init__(self) -> None:
        self._by_size: dict[tuple[int, int, int], list[B]] = {}

    def take(self, size: tuple[int, int, int]) -> B | None:
        """Some of such a size, see `Sized`; None where there are none."""
        try:
            return self._by_size[size].pop()
        except (KeyError, IndexError):
            return None

    def give_back(self, buffers: B) -> None:
        """Keep them, if they are small; those of the sizes that came first make room for them."""
        if buffers.num_bytes > MOST_KEPT_BYTES:
            return
        kept = self._by_size
        while buffers.num_bytes + self.num_bytes > MOST_BYTES:
            kept.pop(next((size for size, spares in list(kept.items()) if spares), buffers.size), None)
        kept.setdefault(buffers.size, []).append(buffers)

    @property
    def num_bytes(self) -> int:
        """Of all that are kept."""
        return sum([one.num_bytes for spares in list(self._by_size.values()) for one in list(spares)])
