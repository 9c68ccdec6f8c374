"""Threads: one per physical core that may be used, what the environment says, or what is asked for."""

from __future__ import annotations

import os

import pytest
import torch

from selfspec.kernels import machine


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
