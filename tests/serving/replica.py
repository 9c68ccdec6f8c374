"""What replicas serve in tests: a slow random model with drafts of its process; a file breaks its engine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.helpers import Schedule
from tests.serving.server import speaker

SECONDS = 0.04  # that a program takes at least, so that a test can step in


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
