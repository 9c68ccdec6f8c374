"""Recordings by key, under a memory budget: made on first use, the one unused for longest given up first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from selfspec.executors.cuda.capture import Body, Capture, Recording


class Buffers(Protocol):
    """What a caller writes a call into."""

    @property
    def num_bytes(self) -> int: ...


Inputs = TypeVar("Inputs", bound=Buffers)


class Recorded(NamedTuple, Generic[Inputs]):
    """A recording, and who holds the memory that it reads: the buffers of its inputs, and its body."""

    inputs: Inputs
    body: Body
    recording: Recording

    @property
    def num_bytes(self) -> int:
        return self.recording.num_bytes + self.inputs.num_bytes


class Graphs:
    """Keeps recordings.

    Args:
        capture: who records.
        budget: bytes of device memory that all recordings together may keep, their inputs included; the one in use
            stays, whatever it takes.
        most: how many there may be.
    """

    def __init__(self, capture: Capture, budget: int, most: int = 512) -> None:
        self.capture, self.budget, self.most = capture, budget, most
        self._kept: OrderedDict[Hashable, Recorded[Any]] = OrderedDict()
        self.num_recorded = 0
        """Recordings made so far, those since given up included."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self._kept.values())

    def get(self, key: Hashable) -> Recorded[Any] | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def record(self, key: Hashable, inputs: Inputs, body: Body) -> Recorded[Inputs]:
        """Record a body that reads `inputs`, which hold what its first call is about."""
        made = self._kept[key] = Recorded(inputs, body, self.capture.record(body))
        self.num_recorded += 1
        while len(self._kept) > 1 and (len(self._kept) > self.most or self.num_bytes > self.budget):
            self._kept.popitem(last=False)
        return made

    def forget(self, is_stale: Callable[[Hashable], bool]) -> None:
        """Give up the recordings whose keys are stale."""
        for key in [key for key in self._kept if is_stale(key)]:
            del self._kept[key]
