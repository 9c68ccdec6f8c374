"""Two processes with half of every weight each write what one with all of them writes; one of the two decides."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import share_compiled
from tests.models import build
from tests.parallel.rank import OPTIONS, PROMPTS, SAMPLED
from tests.target import Target

pytestmark = pytest.mark.slow  # two processes import torch
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """What the two ranks wrote, and the model as one process has it."""
    folder = tmp_path_factory.mktemp("ranks")
    model = build("llama").double()
    model.save_pretrained(folder / "model")
    command = [sys.executable, "-m", "tests.parallel.rank", str(folder)]
    started = []
    for rank in range(2):
        # Each its own cache, but for the compiled library: what one of them finds there, the other does not.
        share_compiled(cache := folder / f"cache{rank}", ROOT)
        own = {**os.environ, "SELFSPEC_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen([*command, str(rank)], cwd=ROOT, env=own, **pipes))
    try:
        said = [process.communicate()[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)], Target(model)


@pytest.mark.parametrize("way", ["plain", "fixed", "endless", "dice", "adaptive", "sampled", "responses"])
def test_every_way_to_decode_writes_what_one_process_writes(records, way):
    (first, second), target = records
    options = SAMPLED if way == "sampled" else {}
    wanted = [one.token_ids for one in target.generate(PROMPTS, policy="plain", **OPTIONS, **options)]
    assert first[way] == second[way] == wanted


def test_one_rank_decides_for_both(records):
    (first, second), _ = records
    assert first["ranks"] == second["ranks"] == 2
    assert first["asked"] > 0 == second["asked"]
    assert first["again"] == second["again"] > 20  # of finished responses each has its own
    assert first["costs"] == second["costs"]  # though each has its own clock


def test_what_cannot_be_had_is_said_on_every_rank(records):
    for number, record in enumerate(records[0]):
        refused = record["refused"]
        assert refused["learn"].startswith("ValueError: learn works by the clock of one process")
        assert "no plan today" in refused["broken"]
        assert refused["broken"].startswith("KeyError" if number == 0 else "RuntimeError: the policy failed on rank 0")
        assert "tensor parallelism only, got fsdp" in refused["fsdp"]
        assert "it is spread over several processes; decode without exact" in refused["exact"]
