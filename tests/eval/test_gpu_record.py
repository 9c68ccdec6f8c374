"""The record of `python -m eval gpu`, its share of time for every part, and parts in processes of their own."""

import json
import os
import struct
from multiprocessing import Pipe
from time import perf_counter

import pytest

from eval.gpu import process, record
from eval.gpu.record import Budget, Record, file_writer
from tests.eval import faults


@pytest.mark.parametrize(
    ("work", "why", "content"),
    [
        (faults.finish, None, {"not_measured": [], "done": 3}),
        (faults.fail, "ValueError: no such thing", {"not_measured": [{"what": "a", "why": "b"}]}),
    ],
)
def test_work_in_a_process_of_its_own_is_kept_as_it_comes(work, why, content):
    kept = []
    assert process.run_apart(work, (3,), perf_counter() + 60, kept.append) == why
    assert kept[-1] == content


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.0)
    why = process.run_apart(faults.hang, (), perf_counter() + 0.5, lambda content: None)
    assert why == "it took 0 s longer than it had, and was ended"


def test_a_process_that_dies_while_it_sends_has_ended():
    receiver, sender = Pipe(duplex=False)
    os.write(sender.fileno(), struct.pack("!i", 100) + b"half a message")
    sender.close()
    with receiver, pytest.raises(EOFError):
        process.received(receiver)


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "gpu.json"
    made = Record(file_writer(path))
    made.content["a"] = 1
    made.save()
    made.content["b"] = {(1, 2): "no JSON has such keys"}
    with pytest.raises(TypeError):
        made.save()
    assert json.loads(path.read_text())["a"] == 1


def test_what_a_part_leaves_over_later_parts_have(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(record, "perf_counter", lambda: now[0])
    budget = Budget(60.0, {"a": 1.0, "b": 1.0, "c": 2.0})
    assert budget.end_of("a") == pytest.approx(115)
    now[0] += 3
    assert budget.end_of("b") == pytest.approx(103 + 19)
    now[0] += 40
    assert budget.end_of("c") == pytest.approx(143 + 17)


def test_what_is_worth_most_has_its_time_in_a_short_run_and_its_share_in_a_long_one(monkeypatch):
    monkeypatch.setattr(record, "perf_counter", lambda: 0.0)
    for seconds, end in [(40.0, 40.0), (200.0, 50.0), (1000.0, 250.0)]:
        assert Budget(seconds, {"a": 1.0, "b": 3.0}, {"a": 50.0}).end_of("a") == pytest.approx(end)
