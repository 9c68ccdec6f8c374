"""The stand-in for graphs fails where a device would: each fault that a GPU has shown, put into a small body."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from selfspec.executors.cuda.capture import CannotCapture
from selfspec.executors.cuda.rounds import StaticRows
from selfspec.kernels.suite import REFERENCE
from selfspec.model.kv_cache import PagedCache
from tests.cuda.tape import Tape
from tests.kernels.samples import layout_of


def test_a_replay_does_the_recorded_operations_on_what_the_inputs_hold_now():
    given, runs = torch.tensor([1.0, 2.0]), []

    def body():
        runs.append(1)
        doubled = given * 2
        doubled[0] += 1
        return (doubled.flip(0),)

    made = Tape().record(body)
    given.copy_(torch.tensor([10.0, 20.0]))
    made.replay()
    assert made.outputs[0].tolist() == [40.0, 21.0]
    assert len(runs) == 2, "a replay runs no Python"
    assert made.num_bytes >= made.outputs[0].nbytes


def test_what_python_does_in_a_body_is_not_done_again():
    given, seen = torch.ones(2), []

    def body():
        seen.append(given + 1)
        return (seen[0] * given,)  # made by the run before the recording

    made = Tape().record(body)
    given.fill_(3.0)
    made.replay()
    assert made.outputs[0].tolist() == [6.0, 6.0]
    del seen[:]
    with pytest.raises(AssertionError, match="nobody holds any longer"):
        made.replay()


def test_memory_of_one_recording_is_overwritten_by_the_replay_of_another():
    tape, given = Tape(), torch.ones(2)
    first, second = (tape.record(lambda i=i: (given + i,)) for i in range(2))
    first.replay()
    second.replay()
    assert first.outputs[0].isnan().all() and second.outputs[0].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x: (x * x.sum().item(),), "aten._local_scalar_dense"),
        (lambda x: (x[x > 0],), "aten.index"),
        (lambda x: (x.nonzero(),), "aten.nonzero"),
        (lambda x: (x + torch.tensor([1.0, 2.0]),), "aten.lift_fresh"),
        (lambda x: (torch.repeat_interleave(x, torch.ones(2, dtype=torch.int64)),), "aten.repeat_interleave"),
        (
            lambda x: (torch._grouped_mm(x.new_ones(8, 8), x.new_ones(2, 8, 8), offs=x.new_ones(2).int()),),
            "aten._grouped_mm",
        ),
    ],
)
def test_what_a_graph_cannot_hold_is_refused_by_name(operation, name):
    given = torch.ones(2)
    with pytest.raises(CannotCapture) as refused:
        Tape().record(lambda: operation(given))
    assert refused.value.operation.startswith(name)
    assert "not permitted when stream is capturing" in refused.value.reason


def test_static_rows_are_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        rows = StaticRows(PagedCache(4, 16), layout_of([(0, 1)], 16)[0], REFERENCE)
        rows.attend(rows, torch.ones(2, 1, 8), *torch.ones(2, 4, 16, 2, 8), (None, None), 1.0)
        seen = weakref.ref(rows)
        del rows
        assert seen() is None
    finally:
        gc.enable()
