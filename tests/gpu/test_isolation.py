"""Tests that lose their context or their process take no other test down: a small suite of such, run by pytest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import isolation
from tests.gpu.isolation import Parent, exit_code, lost_context

SUITE = """
import os, signal
import pytest

pytestmark = pytest.mark.gpu
lost = []

def test_passes_before():
    assert not lost

def test_loses_the_context():
    import torch
    lost.append(True)
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\\nmore of it")

def test_passes_after():
    assert not lost, "poisoned by another test"

def test_exits():
    os._exit(7)

def test_is_killed():
    print("about to be killed")
    os.kill(os.getpid(), signal.SIGSEGV)

def test_fails():
    assert not lost
    assert 1 == 2

def test_skips():
    pytest.skip("for a reason")

@pytest.mark.parametrize("value", ["a", "b [c]"])
def test_passes_at_last(value):
    assert not lost
"""


def run_pytest(folder, *arguments, processes=1):
    """Exit code and output of pytest on `SUITE`."""
    (folder / "conftest.py").write_text('pytest_plugins = ["tests.gpu.isolation"]\n')
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a device\naddopts = -ra -m 'not gpu'\n")
    (folder / "test_faults.py").write_text(SUITE)
    variables = {"PYTHONPATH": str(Path(__file__).parents[2]), "GPU_TEST_PROCESSES": str(processes)}
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", *arguments]
    variables |= {name: value for name, value in os.environ.items() if name not in variables}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return run_pytest(tmp_path_factory.mktemp("suite"), processes=2)


@pytest.mark.slow
def test_a_lost_process_costs_one_test(outcome):
    code, printed = outcome
    assert code == 1
    for name in ("passes_before", "passes_after", "passes_at_last[a]", "passes_at_last[b [c]]"):
        assert f"test_faults.py::test_{name} PASSED" in printed
    assert "4 failed, 4 passed, 1 skipped" in printed
    assert "poisoned by another test" not in printed and "for a reason" in printed


@pytest.mark.slow
def test_the_first_error_is_named(outcome):
    _, printed = outcome
    summary = printed[printed.index("lost CUDA contexts and processes, the first one first") :]
    told = dict(line.split(": ", 1) for line in summary.splitlines() if line.startswith("test_faults.py::"))
    assert told == {
        "test_faults.py::test_loses_the_context": (
            "AcceleratorError: CUDA error: an illegal memory access was encountered"
        ),
        "test_faults.py::test_exits": "the process ended with exit code 7 before the test did",
        "test_faults.py::test_is_killed": "the process ended with SIGSEGV before the test did",
    }
    assert "assert 1 == 2" in printed  # reports are whole


@pytest.mark.slow
def test_one_test_can_be_asked_for(tmp_path):
    code, printed = run_pytest(tmp_path, "test_faults.py::test_passes_at_last[b [c]]")
    assert code == 0 and "1 passed" in printed


def test_the_first_failure_ends_the_run_where_that_is_asked_for(tmp_path):
    code, printed = run_pytest(tmp_path, "-x", "-k", "exits or at_last")
    assert code == 1 and "1 failed" in printed and "passed" not in printed


def test_a_child_that_hangs_at_its_end_is_ended(monkeypatch):
    monkeypatch.setattr(isolation, "GRACE", 0.1)
    assert exit_code(subprocess.Popen(["sleep", "100"])) == -signal.SIGKILL


def test_a_child_that_starts_while_all_are_ended_is_ended_too(request, tmp_path):
    parent = Parent(request.config)
    parent.stopping = True
    with (tmp_path / "log").open("w") as log:
        process, events = parent.start([request.node.nodeid], log)
        assert list(events) == [] and process.wait(10) == -signal.SIGKILL


def test_only_a_device_error_or_what_comes_of_it_is_a_lost_context():
    assert lost_context(RuntimeError("CUDA error: but not of torch's class")) is None
    assert lost_context(torch.OutOfMemoryError("too much")) is None
    lost = torch.AcceleratorError("CUDA error: x\ny")
    assert lost_context(lost) == "AcceleratorError: CUDA error: x"
    try:
        try:
            raise lost
        finally:
            raise AssertionError("a consequence")
    except AssertionError as problem:
        assert lost_context(problem) == "AcceleratorError: CUDA error: x"
