"""The faults that `test_mutations` compiles have their places in the sources of today."""

from __future__ import annotations

from pathlib import Path

from tests.executors.faults import FAULTS, faulty_sources


def test_every_fault_stands_once_in_a_copy_of_the_sources(tmp_path: Path) -> None:
    faulty_sources(tmp_path)
    for number, edit in enumerate(FAULTS.values(), 1):
        assert f"(selfspec_fault == {number})" in (tmp_path / edit.file).read_text("utf-8")
