"""Record the tensor operations of a function and replay them without its Python code: CUDA graphs, or a substitute.

A recording reads and writes fixed addresses. Its owner must also keep its body, and the body must hold every tensor
that it reads: freed memory is allocated again, and the recording would still read it. All recordings share one memory
pool, so a replay may overwrite the outputs of any other recording. Callers copy the outputs that they keep.

Other threads may use the device while one records: what they allocate, launch and await is of other streams, and the
capture mode is "thread_local". Two things may not be: a second capture, and a wait for the whole device. The garbage
collector is paused, since it may drop another recording, which a thread that captures must not do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec.collector import uncollected

MOST_DRIVER_BYTES = 64 << 20  # what the driver is believed to take for a recording
CAPTURING = threading.Lock()  # torch allows one capture at a time in a process
Body = Callable[[], tuple[Tensor, ...]]


class Recording(Protocol):
    """The recorded operations of a body."""

    outputs: tuple[Tensor, ...]
    num_bytes: int  # device memory allocated for it, without the buffers that it reads

    def replay(self) -> None:
        """Run the operations on the current contents of the inputs, and write the results to `outputs`."""


class Capture(Protocol):
    """Records bodies. Recording runs a body at least once, so running it repeatedly must be harmless."""

    def record(self, body: Body) -> Recording:
        """Record a body.

        Raises:
            CannotCapture: the body cannot be recorded; names the operation.
            torch.OutOfMemoryError: the device has no memory for it now.
        """


class CannotCapture(RuntimeError):
    """A body contains an operation that cannot be recorded, such as reading a number on the host."""

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(f"{operation}: {reason}")
        self.operation, self.reason = operation, reason


class OperationTracer(TorchDispatchMode):
    """Keeps the name of the last operation, for error messages."""

    last = "nothing"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last = str(func)
        return func(*args, **(kwargs or {}))


class CudaCapture:
    """Records CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = _Pool(device, self._stream)

    def record(self, body: Body) -> Recording:
        """Record a body; see `Capture.record`. It first runs once unrecorded, to compile kernels and fill caches."""
        with CAPTURING, uncollected():
            return self._record(body)

    def _record(self, body: Body) -> Recording:
        tracer = OperationTracer()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            body()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # as a capture does, so that free memory differs by what the recording takes
        before, free = self._pool.num_bytes(), torch.cuda.mem_get_info(self.device)[0]
        graph = torch.cuda.CUDAGraph()
        try:
            with self._pool.capturing(graph), tracer:
                outputs = body()
        except Exception as problem:
            torch.cuda.synchronize(self.device)
            causes = (problem, problem.__context__, problem.__cause__)
            memory = next((one for one in causes if isinstance(one, torch.OutOfMemoryError)), None)
            if memory is not None:
                raise memory from problem
            raise CannotCapture(tracer.last, str(problem).partition("\n")[0]) from problem
        grown = self._pool.num_bytes() - before
        # The driver's own memory is in no pool; other threads may have taken some of what is gone.
        taken = min(free - torch.cuda.mem_get_info(self.device)[0], grown + MOST_DRIVER_BYTES)
        return _CudaRecording(graph, outputs, max(taken, grown, sum(one.nbytes for one in outputs)), self._pool)


class _Pool:
    """The memory pool that graphs share.

    The allocator frees a pool with its last graph, and cannot reopen it while any of its memory is in use. An initial
    graph, which is never replayed, keeps the pool open.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._handle, self._stream = torch.cuda.graph_pool_handle(), stream
        self._keeper = torch.cuda.CUDAGraph()
        with CAPTURING, uncollected():
            torch.cuda.synchronize(device)
            with self.capturing(self._keeper):
                self._kept = torch.zeros(1, device=device)

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """A context that records launches into `graph` and allocates in the pool."""
        capture = torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local")
        # The outer context restores the current stream if the capture fails; `torch.cuda.graph` alone does not.
        with torch.cuda.stream(self._stream), capture:
            yield

    def num_bytes(self) -> int:
        """Device memory of the pool. (`memory_reserved` would not do: it shrinks when a capture empties caches.)"""
        segments = torch.cuda.memory_snapshot()
        return sum(int(one["total_size"]) for one in segments if one["segment_pool_id"] == self._handle)


class _CudaRecording:
    """A recorded CUDA graph. It references the pool, which must outlive its graphs."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...], num_bytes: int, pool: _Pool) -> None:
        self._graph, self.outputs, self.num_bytes, self._pool = graph, outputs, num_bytes, pool

    def replay(self) -> None:
        """Replay the graph; see `Recording.replay`."""
        self._graph.replay()
