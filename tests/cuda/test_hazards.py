"""What several threads, several devices and too little memory do to recordings."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec import SamplingParams
from selfspec.decoding.prefix_store import state_of
from selfspec.executors.cuda.capture import CannotCapture
from selfspec.executors.cuda.device_work import DeviceWork
from selfspec.executors.cuda.rounds import HostRecords
from selfspec.kernels.layout import SamplingTensors
from tests.cuda.standin import runner_of, with_runner
from tests.cuda.tape import Failing
from tests.helpers import Always, decode, make_prompts, tokens_of
from tests.models import build, tiny
from tests.target import Target


class Devices:
    """Several devices of torch.cuda, each with a current stream."""

    def __init__(self):
        self.now, self.done = 0, []
        self.streams = {at: Stream(f"{at}", self) for at in range(2)}

    @contextmanager
    def current(self, device):
        before, self.now = self.now, torch.device(device).index
        try:
            yield
        finally:
            self.now = before

    def stream(self, device=None):
        return self.streams[self.now if device is None else torch.device(device).index]


class Stream:
    def __init__(self, name, devices):
        self.name, self.devices = name, devices

    def wait_stream(self, other):
        self.devices.done.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def devices(monkeypatch):
    made = Devices()
    monkeypatch.setattr(torch.cuda, "device", made.current)
    monkeypatch.setattr(torch.cuda, "current_stream", made.stream)
    return made


def test_a_record_is_awaited_on_the_device_that_copies_it(devices, monkeypatch):
    """An event is recorded on the current device's stream."""

    class Event:
        def record(self):
            devices.done.append(f"recorded on {devices.now}")

    honest = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: honest(shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    records = HostRecords(torch.device("cuda:1"))
    with DeviceWork(torch.device("cuda:1")):
        records.send(torch.zeros(2, 3, dtype=torch.int64))
    assert devices.done == ["recorded on 1"] and devices.now == 0


def test_work_of_another_stream_waits_for_that_of_the_last_one(devices):
    work = DeviceWork(torch.device("cuda:1"))
    with work:
        pass
    first = devices.streams[1]
    devices.streams[1] = Stream("another", devices)
    for _ in range(2):
        with work:
            pass
    devices.streams[1] = first
    with work:
        pass
    assert devices.done == ["another waits for 1", "1 waits for another"]


def test_an_error_under_the_lock_gives_lock_and_device_back(devices):
    work = DeviceWork(torch.device("cuda:1"))
    for _ in range(2):
        with pytest.raises(KeyError), work:
            raise KeyError
    assert devices.now == 0


def decoded_with(problem, when):
    """The tape and runner after drafts of several lengths, whose tokens are those of plain decoding."""
    prompts, params = make_prompts([9, 17]), SamplingParams(max_tokens=12)
    target = Target(build("llama"), backend="views")
    tape = Failing(problem, when)
    runner = target.split.runner = runner_of(target.split, tape=tape)
    wanted = tokens_of(decode(tiny("llama"), prompts, "plain", params))
    for longest in (1, 2, 3):
        assert tokens_of(decode(target, prompts, Always(1, longest), params)) == wanted
    return tape, runner


def test_a_recording_for_which_memory_is_short_is_made_after_the_others_are_dropped():
    tape, runner = decoded_with(torch.OutOfMemoryError("no memory"), {2})
    assert runner.refused is None and len(tape.made) == tape.num_asked - 1 and len(runner.graphs) > 0


def test_no_memory_at_all_costs_no_request(caplog):
    tape, runner = decoded_with(torch.OutOfMemoryError("no memory"), range(2, 99))
    assert runner.refused is None and len(tape.made) == 1
    assert "no memory is left for a recording" in caplog.text


def test_a_failed_capture_costs_the_recordings_of_its_shape_alone(caplog):
    tape, runner = decoded_with(CannotCapture("aten.mm", "an internal error"), {2})
    assert runner.refused is None and len(runner.graphs) == len(tape.made) > 1
    assert caplog.text.count("a round of this shape cannot be captured in graphs (aten.mm") == 1


class Counting(TorchDispatchMode):
    """Counts operations."""

    num_done = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_done += not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        return func(*args, **(kwargs or {}))


def test_the_state_of_weights_that_recordings_read_costs_no_operation_of_the_device():
    target = with_runner(Target(build("llama"), backend="views"))
    before = state_of(target.split)
    with Counting() as counting:
        again = state_of(target.split)
    assert again == before and counting.num_done == 0
    with torch.no_grad():
        target.model.lm_head.weight.mul_(2)
    assert state_of(target.split) != before


def test_pages_of_all_layers_are_zeroed_at_once():
    target = with_runner(Target(build("llama"), backend="views"))
    cache = target.split.new_cache(4, 16)
    for layer in range(target.split.num_layers):
        cache.layer(layer, torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    pages = cache.reserve(32)
    with Counting() as counting:
        cache.release(pages)
    assert counting.num_done <= 5  # four views of one tensor, and what fills it


def test_half_precision_logits_are_rounded_before_they_are_compared_as_generate_does():
    """The decision about logits in float32 from a half-precision head: there are none, since ties are broken otherwise.

    `generate` converts rounded logits to float32 and takes the first of equal ones. A product with float32 output has
    no ties there, and picks other tokens.
    """
    model = build("llama").bfloat16().eval()
    split = with_runner(Target(model, backend="views")).split
    texts = torch.randint(3, 96, (64, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        hidden = model.model(texts).last_hidden_state.flatten(0, 1)
        wanted = model.lm_head(hidden).to(torch.float32)  # as in `generate`
        unrounded = hidden.float() @ model.lm_head.weight.float().T
        logits = split.logits(hidden)
        assert logits.dtype == torch.float32 and torch.equal(logits, wanted)
        zeros = torch.zeros(len(hidden))
        greedy = SamplingTensors(zeros, zeros.int(), zeros + 1, zeros, zeros.long(), zeros.long(), False, False)
        picks, _ = split.runner.kernels.pick(logits, greedy)
    assert torch.equal(picks, wanted.argmax(-1))
    assert (picks != unrounded.argmax(-1)).sum() >= 3
