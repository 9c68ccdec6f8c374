"""Results of recorded rounds on the host: copies that no one waits for before the results are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_IN_FLIGHT = 2  # rounds: the host reads the record of one while the device runs the next


class HostRecords:
    """A ring of records on the host, pinned where the device is CUDA. A copy to it does not wait for the device."""

    def __init__(self) -> None:
        self._ring: list[tuple[Tensor, Any]] = []  # each with the event after its copy
        self._next = 0

    def send(self, record: Tensor) -> int:
        """Begin to copy a record to the host, and return the place in the ring. The copies keep their order."""
        if not self._ring:
            like = {"dtype": record.dtype, "pin_memory": record.is_cuda}
            events = [torch.cuda.Event() if record.is_cuda else None for _ in range(MAX_IN_FLIGHT)]
            self._ring = [(torch.empty(record.shape, **like), event) for event in events]  # type: ignore[call-overload]
        at, self._next = self._next, (self._next + 1) % MAX_IN_FLIGHT
        held, event = self._ring[at]
        held.copy_(record, non_blocking=True)
        if event is not None:
            event.record()
        return at

    def wait(self, at: int) -> Tensor:
        """The record at a place of the ring, when its copy has ended. It holds until the ring comes round to it."""
        held, event = self._ring[at]
        if event is not None:
            event.synchronize()
        return held
