"""Every kernel compiles for a Hopper device, in bf16, as it is launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

PROGRAM = """
import json
from tests.kernels.ahead_of_time import compile_all
print(json.dumps([one._asdict() for one in compile_all()]))
"""


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_without_spilling(tmp_path):
    """In a process of its own: here, kernels are run in the interpreter."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    told = subprocess.run([sys.executable, "-c", PROGRAM], env=own, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-2000:]
    made = json.loads(told.stdout)
    kernels = {"_scatter", "_split", "_combine", "_bound", "_pick_of_block", "_pick_of_row", "_accept"}
    kernels |= {"_add_norm", "_rotate", "_gate", "_prepare", "_product", "_rotate_attend", "_prefetch"}
    assert {one["kernel"] for one in made} == kernels
    unspilled = {"_split", "_combine", "_product", "_rotate_attend"}
    for one in made:
        assert 0 < one["registers"] <= 255, one
        assert one["stack_bytes"] <= (0 if one["kernel"] in unspilled else 64), one  # spills
        assert one["shared_bytes"] <= 227 * 1024, one
        assert one["prefetches"] == (4 if one["kernel"] == "_prefetch" else 0), "512 lines by 128 threads"
        if one["kernel"] in {"_split", "_rotate_attend"}:
            # Keys and values in loads of 128 bits, those of later steps while one computes.
            assert set(one["copies"]) == {16} and one["under_way"] >= 2, one
        if (
            one["kernel"] == "_product" and "float32" not in one["call"]
        ):  # one instruction, so one order of sums, whatever the number of rows
            assert [name.split(".")[-1] for name in one["products"]] == ["m16n8k16"], one
            assert set(one["copies"]) == {16} and one["under_way"] >= 3, one
