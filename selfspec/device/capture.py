"""Recording what a function does to tensors, and doing it again without its Python: CUDA graphs behind an interface.

A recording reads and writes fixed addresses. What it returns may be overwritten by the replay of any other recording,
since all share one pool of memory: whoever wants to keep a result copies it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Body = Callable[[], tuple[Tensor, ...]]


class Recording(Protocol):
    """A body that was recorded once."""

    outputs: tuple[Tensor, ...]
    num_bytes: int  # memory that it keeps

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


class Watched(TorchDispatchMode):
    """Remembers the last operation, so that a failure can be told by name."""

    last = "nothing"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last = str(func)
        return func(*args, **(kwargs or {}))


class CudaCapture:
    """CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, body: Body) -> Recording:
        """The first run, outside the recording, compiles kernels and makes what is made once."""
        watch = Watched()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            body()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
                watch,
            ):
                outputs = body()
        except Exception as problem:
            torch.cuda.synchronize(self.device)
            raise CannotCapture(watch.last, str(problem).partition("\n")[0]) from problem
        return _CudaRecording(graph, outputs, max(0, torch.cuda.memory_reserved(self.device) - before))


class _CudaRecording:
    def __init__(self, graph: Any, outputs: tuple[Tensor, ...], num_bytes: int) -> None:
        self._graph, self.outputs, self.num_bytes = graph, outputs, num_bytes

    def replay(self) -> None:
        self._graph.replay()


class Repeats:
    """Stands in for capture where there is none: the body is run again at every replay, on the same buffers."""

    def record(self, body: Body) -> Recording:
        return _Repeat(body)


class _Repeat:
    def __init__(self, body: Body) -> None:
        self._body = body
        self.outputs = body()
        self.num_bytes = sum(one.nbytes for one in self.outputs)

    def replay(self) -> None:
        for held, new in zip(self.outputs, self._body(), strict=True):
            held.copy_(new)
