"""`PromptChunks`: how many prompt tokens are read between two rounds of the rows that decode."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch

DEVICE_SECONDS, HOST_SECONDS = 1 / 30, 0.25  # of a chunk, while rows wait for their next round
LEAST = 64  # tokens; on a device, fewer hardly take less time


class Timer(Protocol):
    """A clock that runs from when it is made until `stop`."""

    def stop(self) -> None: ...
    def seconds(self) -> float | None:
        """The seconds in between; None where the device has not got so far."""
        ...


class DeviceTimer:
    """The time on the current CUDA device, for which the host does not wait."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def stop(self) -> None:
        self._end.record()

    def seconds(self) -> float | None:
        return self._start.elapsed_time(self._end) / 1000 if self._end.query() else None


class HostTimer:
    """The time on the host."""

    def __init__(self) -> None:
        self._start = self._end = perf_counter()

    def stop(self) -> None:
        self._end = perf_counter()

    def seconds(self) -> float:
        return self._end - self._start


class PromptChunks:
    """The size of chunks: at most as many tokens as take `limit` seconds, by the time of an earlier one.

    Args:
        most: tokens of a chunk at most.
        limit: seconds that a chunk is to take at most while rows wait for their next round; None: any, and no time is
            measured.
        new_timer: makes a running timer.
        first: tokens of a chunk at most before any time is known; None: `most`.
    """

    def __init__(
        self,
        most: int,
        limit: float | None,
        new_timer: Callable[[], Timer] = DeviceTimer,
        first: int | None = None,
    ) -> None:
        self.most, self._limit, self._new_timer = most, limit, new_timer
        self._size = most if first is None else min(first, most)
        self._running: tuple[int, Timer] | None = None  # a chunk's tokens, and its time

    def size(self) -> int:
        """Tokens of the next chunk, for which rows wait."""
        if self._running is None or self._limit is None:
            return self._size
        num, timer = self._running
        seconds = timer.seconds()
        if seconds is not None:
            self._running = None
            self._size = min(self.most, max(LEAST, int(num * self._limit / max(seconds, 1e-6))))
        return self._size

    def measured(self, read: Callable[[], int]) -> None:
        """Read a chunk by `read`, which returns the number of its tokens; measure its time, if no other is awaited."""
        if self._limit is None or self._running is not None:
            read()
            return
        timer = self._new_timer()
        num = read()
        timer.stop()
        if num >= LEAST:  # the time of fewer is that of a forward, whatever their number
            self._running = num, timer


def chunks_for(stack: Any, most: int) -> PromptChunks:
    """Chunks of at most `most` tokens for a `selfspec.model.stack.Stack`.

    On the processor only the compiled engine's are bounded, whose results do not depend on them, bit for bit.
    """
    if stack.device.type == "cuda":
        return PromptChunks(most, DEVICE_SECONDS)
    if stack.engine == "compiled":
        return PromptChunks(most, HOST_SECONDS, HostTimer, LEAST)
    return PromptChunks(most, None)
