"""Measure a device: bandwidth, the seconds of calls by its own clock, and the kernels that it runs.

The same functions run on a CPU, by the host's clock, so that everything that uses them can be tried there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from eval.measurement import synchronize, timed

GIB = 1 << 30


class Kernels(NamedTuple):
    """What a device ran during a call."""

    seconds: float  # that it was busy, copies included
    count: int  # kernels, without copies
    launches: int  # of the host; a graph is one


def device_speed(device: torch.device, num_bytes: int = GIB, size: int = 8192, repeats: int = 8) -> dict[str, float]:
    """Measure a device's bandwidth and, on a GPU, its FLOP/s; the best of the repeats.

    Returns:
        `copy_bytes_per_second`, read and written bytes of a large copy; `matmul_flops_per_second`, of a square product
        in bfloat16.
    """
    source = torch.zeros(num_bytes if device.type == "cuda" else num_bytes >> 4, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {"copy_bytes_per_second": 2 * source.nbytes / _least(lambda: target.copy_(source), repeats, device)}
    if device.type == "cuda":
        a, b = torch.randn(2, size, size, device=device).to(torch.bfloat16)
        found["matmul_flops_per_second"] = 2 * size**3 / _least(lambda: a @ b, repeats, device)
    return found


def _least(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    return min(timed(call, device)[1] for _ in range(repeats))


def seconds_of(call: Callable[[], Any], device: torch.device, times: int = 8, repeats: int = 5) -> float:
    """Seconds of a call: the median over the repeats of the mean of `times` calls in a row.

    On a GPU they are between two events, so the host's launches are hidden behind the device's work. The first repeat
    is not counted.
    """
    found = []
    for _ in range(repeats + 1):
        synchronize(device)
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(times):
                call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3 / times)
        else:
            begun = perf_counter()
            for _ in range(times):
                call()
            found.append((perf_counter() - begun) / times)
    return statistics.median(found[1:])


def kernels_of(call: Callable[[], Any], device: torch.device) -> Kernels:
    """What the device ran during a call, by torch's profiler, which also counts the kernels within a graph.

    Raises:
        ValueError: the device is no GPU, or its profiling library (CUPTI) reports nothing.
    """
    if device.type != "cuda":
        raise ValueError("kernels are counted only on a CUDA device")
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        synchronize(device)
    found = counted(seen.key_averages())
    if not found.count:
        raise ValueError("torch's profiler reports no kernels; CUPTI may be refused on this machine")
    return found


def counted(events: Iterable[Any]) -> Kernels:
    """What the events of a profile say. Launches on the host include their kernels' time, so it is not added up."""
    events = list(events)
    done = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    kernels = [e for e in done if not e.key.startswith(("Memcpy", "Memset"))]
    launches = [e for e in events if e.device_type == DeviceType.CPU and "Launch" in e.key and e.key.startswith("cu")]
    seconds = sum(e.self_device_time_total for e in done) / 1e6
    return Kernels(seconds, sum(e.count for e in kernels), sum(e.count for e in launches))


class Recorded:
    """A body as a CUDA graph, or on other devices the body itself, which then runs at every replay.

    The body runs twice before it is recorded, so that kernels are compiled. It must hold the tensors that it reads.
    """

    def __init__(self, body: Callable[[], Any], device: torch.device) -> None:
        self._body, self._graph = body, None
        if device.type != "cuda":
            return
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            body()
            body()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self._graph):
            self._outputs = body()

    def replay(self) -> None:
        """Run the operations once."""
        if self._graph is None:
            self._body()
        else:
            self._graph.replay()

    @property
    def num_nodes(self) -> int:
        """The number of operations of the graph, kernels and copies: what can be counted without CUPTI.

        Raises:
            ValueError: there is no graph.
            ImportError: the package cuda-bindings, which comes with torch, is missing.
        """
        if self._graph is None:
            raise ValueError("graphs are recorded only on a CUDA device")
        from cuda.bindings import runtime  # type: ignore[import-not-found, unused-ignore]

        problem, _, count = runtime.cudaGraphGetNodes(self._graph.raw_cuda_graph())
        if int(problem):
            raise ValueError(f"the graph's nodes cannot be counted: {problem}")
        return int(count)
