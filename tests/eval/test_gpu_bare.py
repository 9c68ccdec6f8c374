"""`python -m eval gpu` and the tests of a device need torch, transformers and pytest, and no other package."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eval.config import FOLDER
from tests.slow import slow

# What a machine with a device may lack; hypothesis is what the test suite itself needs.
ABSENT = ["datasets", "gguf", "jinja2", "lm_eval", "matplotlib", "omegaconf", "peft", "rich", "scipy", "torchao"]
ABSENT += ["typer", "xllamacpp"]
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))\n"


def run(code):
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, check=False)


def test_the_command_reads_its_options_without_other_packages(tmp_path):
    given = ["gpu", str(FOLDER / "gpu_small.yaml"), "--minutes", "0", "--output", str(tmp_path)]
    done = run(f"from eval.__main__ import main; sys.exit(main({given!r}))")
    assert done.returncode == 0, done.stderr
    assert "tiny: everything" in done.stdout


@pytest.mark.parametrize("kind", [slow("cells")])
def test_every_cell_is_measured_without_other_packages(kind, tmp_path):
    given = ["gpu", str(FOLDER / "gpu_small.yaml"), "--contexts", "48", "--output", str(tmp_path)]
    code = "from tests.eval.test_gpu import here; from eval import gpu; from eval.__main__ import main\n"
    done = run(f"{code}if __name__ == '__main__': gpu.run_in_process = here; sys.exit(main({given!r}))")
    assert done.returncode == 0, done.stderr
    assert "tiny: not measured (4)" in done.stdout  # busy times, which a CPU cannot tell


@pytest.mark.slow
def test_the_tests_of_a_device_are_collected_without_other_packages():
    given = ["-m", "gpu", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = run(f"import pytest; sys.exit(pytest.main({given!r}))")
    assert done.returncode == 0, done.stdout
    assert "test_conformance.py" in done.stdout and "error" not in done.stdout.lower()
