"""Threads: one per physical core that may be used, what the environment says, or what is asked for.

And the threads of the compiled library, which are kept between calls.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from selfspec.kernels import machine
from selfspec.kernels.compiler import library


@pytest.fixture
def cpus(monkeypatch, tmp_path):
    """Eight processors, two to a core, of which six may be used."""
    for processor in range(8):
        place = tmp_path / f"cpu{processor}" / "topology"
        place.mkdir(parents=True)
        place.joinpath("thread_siblings_list").write_text(f"{processor % 4},{processor % 4 + 4}\n")
    monkeypatch.setattr(machine, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(machine, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5, 6}, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "cores"), [(None, 3), ("max 100000", 3), ("200000 100000", 2), ("50000 100000", 1), ("odd", 3)]
)
def test_cores_are_physical_ones_within_affinity_and_quota(cpus, quota, cores):
    if quota is not None:
        (cpus / "cpu.max").write_text(quota + "\n")
    assert machine.usable_cores() == cores


def test_processors_of_unknown_topology_count_one_each(cpus, monkeypatch):
    monkeypatch.setattr(machine, "TOPOLOGY", cpus / "nowhere")
    assert machine.usable_cores() == 6


def test_what_is_asked_for_comes_before_the_environment_and_that_before_the_cores(cpus, monkeypatch):
    told = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    machine.set_threads(None)
    assert told == []
    machine.set_threads(5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    machine.set_threads(None)
    assert told == [5, 3]


COUNT = 64
WORDS = torch.arange(COUNT * 1024, dtype=torch.int32)


def checksums(num_threads):
    """The library's checksums of `COUNT` ranges of `WORDS`."""
    starts = (ctypes.c_void_p * COUNT)(*[WORDS.data_ptr() + 4096 * i for i in range(COUNT)])
    sizes, out = (ctypes.c_int64 * COUNT)(*[4096] * COUNT), (ctypes.c_uint64 * COUNT)()
    library().selfspec_checksums(starts, sizes, ctypes.c_int64(COUNT), out, ctypes.c_int64(num_threads))
    return list(out)


def test_calls_of_several_threads_at_once_get_threads_of_their_own():
    alone = checksums(1)
    assert len(set(alone)) == COUNT
    with ThreadPoolExecutor(6) as callers:
        assert all(got == alone for got in callers.map(checksums, [2, 3, 1, 5, 4, 2] * 50))


def test_a_forked_child_has_threads_of_its_own():
    program = "from tests import test_threads as t; import os; a = t.checksums(3); child = os.fork()\n"
    program += "b = t.checksums(3)\nif not child: os._exit(a != b)\nprint(os.waitpid(child, 0)[1], a == b)"
    command, root = [sys.executable, "-c", program], Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "0 True\n", done.stderr


def test_idle_threads_use_no_core():
    """They yield the core for a while before they sleep, for longer where others want it."""
    checksums(4)
    spent = [1.0]
    while len(spent) < 100 and spent[-1] > 0.02:
        before = time.process_time()
        time.sleep(0.1)
        spent.append(time.process_time() - before)
    assert spent[-1] <= 0.02
