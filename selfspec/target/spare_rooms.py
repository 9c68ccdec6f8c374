"""`Spare`: rooms of compiled rounds that are in nobody's use."""

from __future__ import annotations

from selfspec.target.compiled import CompiledBody
from selfspec.target.round_room import Room

MOST_SPARE_BYTES, MOST_KEPT_BYTES = 1 << 25, 1 << 22  # of the rooms that a model keeps, and of each


class Spare:
    """Rooms of a model that are in nobody's use: new memory takes as long as a token of a small one. Engines of a model
    may run in several threads, each with rooms that are its own until it gives them back."""

    def __init__(self) -> None:
        self._by_size: dict[tuple[int, int, int], list[Room]] = {}

    def take(self, body: CompiledBody, size: tuple[int, int, int]) -> Room:
        """One of such a size, see `Room`."""
        try:
            return self._by_size[size].pop()
        except (KeyError, IndexError):
            return Room(body, *size)

    def give_back(self, room: Room) -> None:
        if room.num_bytes > MOST_KEPT_BYTES:
            return
        kept = self._by_size
        total = room.num_bytes + sum([spare.num_bytes for spares in list(kept.values()) for spare in list(spares)])
        if total > MOST_SPARE_BYTES:
            first = next((size for size, spares in list(kept.items()) if spares), room.size)
            kept.pop(first, None)  # of the size that came first
        kept.setdefault(room.size, []).append(room)
