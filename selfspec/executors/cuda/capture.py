"""Recording what a function does to tensors, and doing it again without its Python: CUDA graphs behind an interface.

A recording reads and writes fixed addresses. Whoever keeps a recording keeps its body too, which must hold every tensor
that it reads: memory that nobody holds is given to others, and the recording would go on reading it. What it returns
may be overwritten by the replay of any other recording, since all share one pool of memory: whoever wants to keep a
result copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Body = Callable[[], tuple[Tensor, ...]]


class Recording(Protocol):
    """A body that was recorded once."""

    outputs: tuple[Tensor, ...]
    num_bytes: int  # device memory that was taken for it, without the buffers that it reads

    def replay(self) -> None:
        """Do it again, on what its inputs hold now; results are written into `outputs`."""


class Capture(Protocol):
    """Records bodies. A body is run at least once meanwhile, so it must be one that may be run again."""

    def record(self, body: Body) -> Recording:
        """Raises CannotCapture, which names the operation, for a body that cannot be recorded."""


class CannotCapture(RuntimeError):
    """A body does what a recording cannot repeat, such as waiting for a number."""

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(f"{operation}: {reason}")
        self.operation, self.reason = operation, reason


class OperationTracer(TorchDispatchMode):
    """Remembers the last operation, so that a failure can be told by name."""

    last = "nothing"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last = str(func)
        return func(*args, **(kwargs or {}))


class CudaCapture:
    """CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = _Pool(device, self._stream)

    def record(self, body: Body) -> Recording:
        """The first run, outside the recording, compiles kernels and makes what is made once."""
        watch = OperationTracer()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            body()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        torch.cuda.synchronize(self.device)
        before = self._pool.num_bytes()
        graph = torch.cuda.CUDAGraph()
        try:
            with self._pool.capturing(graph), watch:
                outputs = body()
        except Exception as problem:
            torch.cuda.synchronize(self.device)
            raise CannotCapture(watch.last, str(problem).partition("\n")[0]) from problem
        grown = self._pool.num_bytes() - before
        return _CudaRecording(graph, outputs, max(grown, sum(one.nbytes for one in outputs)), self._pool)


class _Pool:
    """Memory that graphs share. A first graph, never replayed, keeps it from being given back between two others.

    The allocator gives a pool back with its last graph, and cannot open it again while any of its memory is in use.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._handle, self._stream = torch.cuda.graph_pool_handle(), stream
        self._keeper = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with self.capturing(self._keeper):
            self._kept = torch.zeros(1, device=device)

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """A context in which what is launched is recorded, and what is allocated lies in the pool."""
        taken = torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local")
        # The outer context leaves the stream where a capture fails; `torch.cuda.graph` alone does not.
        with torch.cuda.stream(self._stream), taken:
            yield

    def num_bytes(self) -> int:
        """Device memory that the pool holds. (`memory_reserved` also falls when caches are emptied for a capture.)"""
        segments = torch.cuda.memory_snapshot()
        return sum(int(one["total_size"]) for one in segments if one["segment_pool_id"] == self._handle)


class _CudaRecording:
    """Holds the pool, which has to be there as long as any of its graphs."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...], num_bytes: int, pool: _Pool) -> None:
        self._graph, self.outputs, self.num_bytes, self._pool = graph, outputs, num_bytes, pool

    def replay(self) -> None:
        self._graph.replay()
