"""Ray for tests, and what replicas serve: a slow random model with drafts of its process; a file breaks its engine."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers import Schedule
from tests.serving.server import speaker

ROOT = Path(__file__).parents[2]
SECONDS = 0.04  # that a program takes at least, so that a test can step in


@pytest.fixture(scope="module")
def local_ray():
    """Ray on this machine, for processes that find this repository."""
    if find_spec("ray") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs Ray: pip install 'selfspec[ray]'")
    paths = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    told = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        yield


class Dice(Schedule):
    """Throws dice of this process, slowly, until its file is there."""

    def __init__(self, marks: Path) -> None:
        super().__init__(os.getpid(), 4)
        self.breaks = marks / f"break-{os.getpid()}"

    def plan(self, rows):
        if self.breaks.exists():
            raise RuntimeError("the policy is broken")
        time.sleep(SECONDS)
        return super().plan(rows)


def make(marks: Path):
    """The LLM of a replica, which leaves its process id in a file of its own name."""
    from ray import serve

    name = serve.get_replica_context().replica_id.unique_id
    (marks / name).write_text(str(os.getpid()))
    return speaker(Dice(marks))


def make_worker(marks: Path):
    """The LLM of a batch's process, which leaves its id as the name of a file."""
    (marks / str(os.getpid())).touch()
    return speaker(Dice(marks))
