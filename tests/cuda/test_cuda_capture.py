"""`CudaCapture` against a stand-in for torch.cuda: streams, the shared pool, and what a recording is said to take.

The stand-in behaves as torch does: a capture empties the allocator's cache first, one that fails does not give the
stream back, and a pool whose last graph is gone cannot be opened again while its memory is in use.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import torch

from selfspec.executors.cuda.capture import CannotCapture, CudaCapture

SEGMENT = 2 << 20


class Device:
    """What torch.cuda would know."""

    def __init__(self):
        self.stream = "the caller's"
        self.cached = 0  # bytes that the allocator holds outside the pool
        self.pool_bytes = 0
        self.driver_bytes = 0  # that the driver takes for each graph
        self.graphs = weakref.WeakSet()  # those that hold the pool
        self.was_opened, self.num_captured, self.is_capturing = False, 0, False
        self.done = []  # what orders the work of streams

    def new_stream(self, device):
        return SimpleNamespace(wait_stream=lambda other: self.done.append("the recorder's waits for the caller's"))

    def current_stream(self, device):
        return SimpleNamespace(wait_stream=lambda other: self.done.append("the caller's waits for the recorder's"))

    def synchronize(self, device):
        assert not self.is_capturing, "a wait for the device ends the capture under way"
        self.done.append("the host waits for the device")

    @contextmanager
    def using(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def capturing(self, graph, pool, stream, capture_error_mode):
        assert not self.was_opened or self.graphs, "the pool was given back while its memory was in use"
        assert pool == (0, 7) and capture_error_mode == "thread_local"
        assert not self.is_capturing and not gc.isenabled()
        self.done.append("capture")
        self.cached, self.was_opened = 0, True
        self.graphs.add(graph)
        self.stream, self.is_capturing = stream, True
        try:
            yield
        except BaseException as problem:
            raise RuntimeError("operation failed due to a previous error during capture") from problem
        finally:
            self.is_capturing = False
        self.stream = "the caller's"
        self.pool_bytes += SEGMENT
        self.num_captured += 1

    def empty_cache(self):
        self.cached = 0

    def free(self, device):
        taken = self.cached + self.pool_bytes + self.num_captured * self.driver_bytes
        return (1 << 40) - taken, 1 << 40

    def snapshot(self):
        other = {"segment_pool_id": (0, 0), "total_size": self.cached}
        return [other, {"segment_pool_id": (0, 7), "total_size": self.pool_bytes}]


class Graph:
    def replay(self):
        pass


@pytest.fixture
def device(monkeypatch):
    made = Device()
    for name, stand_in in (
        ("Stream", made.new_stream),
        ("current_stream", made.current_stream),
        ("stream", made.using),
        ("synchronize", made.synchronize),
        ("graph_pool_handle", lambda: (0, 7)),
        ("CUDAGraph", Graph),
        ("graph", made.capturing),
        ("memory_snapshot", made.snapshot),
        ("empty_cache", made.empty_cache),
        ("mem_get_info", made.free),
        ("memory_reserved", lambda device: made.cached + made.pool_bytes),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return made


def body_that_caches(device):
    runs = []

    def body():
        runs.append(1)
        if len(runs) == 1:  # the run before the capture leaves memory in the allocator's cache
            device.cached += 10 * SEGMENT
        return (torch.ones(3) + 1,)

    return body


def test_what_a_recording_takes_is_counted_though_caches_were_emptied_for_it(device):
    capture = CudaCapture(torch.device("cpu"))
    made = capture.record(body_that_caches(device))
    assert made.num_bytes == SEGMENT
    assert made.outputs[0].tolist() == [2.0] * 3


def test_what_the_driver_takes_for_a_recording_is_counted(device):
    capture, device.driver_bytes = CudaCapture(torch.device("cpu")), 3 << 20
    assert capture.record(lambda: (torch.ones(3),)).num_bytes == SEGMENT + (3 << 20)


def test_memory_that_is_short_is_told_from_what_cannot_be_recorded(device):
    runs = []

    def body():
        runs.append(1)
        if len(runs) > 1:
            raise torch.OutOfMemoryError("no memory")
        return (torch.ones(3),)

    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture(torch.device("cpu")).record(body)
    assert device.stream == "the caller's"


def test_a_recording_that_fits_into_the_pool_as_it_is_takes_its_results(device, monkeypatch):
    capture = CudaCapture(torch.device("cpu"))
    monkeypatch.setattr(device, "snapshot", lambda: [])
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    assert capture.record(lambda: (torch.ones(3),)).num_bytes == 12


def test_a_capture_that_fails_names_the_operation_and_gives_the_stream_back(device):
    runs = []

    def body():
        runs.append(1)
        doubled = torch.ones(3) * 2
        if len(runs) > 1:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return (doubled,)

    with pytest.raises(CannotCapture, match=r"aten\.mul") as refused:
        CudaCapture(torch.device("cpu")).record(body)
    assert "\n" not in refused.value.reason
    assert device.stream == "the caller's"


def test_the_run_before_a_capture_comes_after_what_filled_its_inputs_and_before_the_capture(device):
    capture, start = CudaCapture(torch.device("cpu")), len(device.done)

    def body():
        device.done.append("body")
        return (torch.ones(3),)

    capture.record(body)
    assert device.done[start:] == [
        "the recorder's waits for the caller's",
        "body",
        "the caller's waits for the recorder's",
        "the host waits for the device",
        "capture",
        "body",
    ]
    assert device.stream == "the caller's"


def test_captures_of_several_models_in_several_threads_wait_for_each_other(device):
    """A second one, or its wait for the device, would end the first. Other work of a thread goes on meanwhile."""
    first, began, may_go_on, done = CudaCapture(torch.device("cpu")), Event(), Event(), []

    def body():
        if device.is_capturing:
            began.set()
            assert may_go_on.wait(20)
        return (torch.ones(3),)

    def beside():
        assert began.wait(20)
        done.append((torch.ones(2, requires_grad=True) * 2).sum().backward())  # training, say
        may_go_on.set()
        done.append(CudaCapture(torch.device("cpu")).record(lambda: (torch.ones(3),)))

    threads = [Thread(target=beside), Thread(target=lambda: done.append(first.record(body)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 3 and device.num_captured == 4 and gc.isenabled()


def test_a_pool_that_cannot_be_opened_gives_the_stream_back(device, monkeypatch):
    def zeros(*size, **how):
        raise RuntimeError("no memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(RuntimeError, match="during capture"):
        CudaCapture(torch.device("cpu"))
    assert device.stream == "the caller's"


def test_the_pool_stays_open_when_all_recordings_are_given_up(device):
    capture = CudaCapture(torch.device("cpu"))
    made = capture.record(lambda: (torch.ones(3),))
    del made
    gc.collect()
    assert len(device.graphs) == 1
    capture.record(lambda: (torch.ones(3),))


def test_a_recording_outlives_who_made_it(device):
    made = CudaCapture(torch.device("cpu")).record(lambda: (torch.ones(3),))
    gc.collect()
    assert len(device.graphs) == 2
    made.replay()
