"""What a device is given: by several threads in one order, beside other work; and the seconds that it takes there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch

TICK = 1e-9  # seconds, the smallest reading


def current(device: torch.device) -> AbstractContextManager[Any]:
    """A context within which a CUDA device is the current one, as its kernels and events need."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class DeviceWork:
    """A lock under which work is given to a device, in the order of the lock, whatever streams its holders use.

    Recordings share memory, so that no two may run at once: what a stream is given first waits on the device for what
    the stream before was given. While the lock is held, its device is the current one: events are recorded, and kernels
    launched, on the current device's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._lock = device, threading.Lock()
        self._guard: Any = None
        self._last: Any = None  # the stream that was given work last

    def __enter__(self) -> None:
        self._lock.acquire()
        if self.device.type != "cuda":
            return
        guard = torch.cuda.device(self.device)
        try:
            guard.__enter__()
            self._guard, stream = guard, torch.cuda.current_stream(self.device)
            if self._last is not None and stream != self._last:
                stream.wait_stream(self._last)
            self._last = stream
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *error: object) -> None:
        guard, self._guard = self._guard, None
        try:
            if guard is not None:
                guard.__exit__(*error)
        finally:
            self._lock.release()


class SideStream:
    """A stream of a device for work beside that of the current one; on CPU, it is done in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fork(self) -> AbstractContextManager[Any]:
        """A context whose work begins after what the current stream was given before."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Let the current stream wait for all work of this one, as a recording needs at its end."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def fastest(work: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Seconds of the fastest of some calls, after one that does not count; on CUDA those of the device."""
    taken = []
    work()
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        else:
            start = perf_counter()
            work()
            taken.append(perf_counter() - start)
    return max(TICK, min(taken))
