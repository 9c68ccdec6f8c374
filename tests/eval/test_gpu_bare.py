"""`python -m eval gpu` and the tests of a device need torch, transformers and pytest, and no other package."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eval.config import FOLDER

# What a machine with a device may lack; hypothesis is what the test suite itself needs.
ABSENT = ["datasets", "gguf", "jinja2", "lm_eval", "matplotlib", "omegaconf", "peft", "rich", "scipy", "torchao"]
ABSENT += ["typer", "xllamacpp"]
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))\n"


def run(code):
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_cell_is_measured_without_other_packages(tmp_path):
    given = ["gpu", str(FOLDER / "gpu_small.yaml"), "--contexts", "48", "--output", str(tmp_path)]
    code = "from tests.eval.test_gpu import here; from eval import gpu; from eval.__main__ import main\n"
    done = run(f"{code}gpu.measure_in_process = here; sys.exit(main({given!r}))")
    assert done.returncode == 0, done.stderr
    assert "hf static" in done.stdout and "not measured" not in done.stdout


@pytest.mark.slow
def test_the_tests_of_a_device_are_collected_without_other_packages():
    given = ["-m", "gpu", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = run(f"import pytest; sys.exit(pytest.main({given!r}))")
    assert done.returncode == 0, done.stdout
    assert "test_conformance.py" in done.stdout and "error" not in done.stdout.lower()
