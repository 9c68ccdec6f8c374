"""The checkpoint of a run that trains exit heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from selfspec.files import write_whole
from train.config_file import different_keys
from train.errors import RunFailed
from train.heads_config import MAY_DIFFER, HeadsRun

CHECKPOINT = "exit_heads.checkpoint.pt"


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Keep everything that a run needs to go on.

    Raises:
        RunFailed: it cannot be written; the checkpoint before is still there.
    """
    try:
        write_whole(folder / CHECKPOINT, lambda stream: torch.save(state, stream))
    except (OSError, RuntimeError) as problem:  # torch's writer has its own error for a full disk
        raise RunFailed(
            f"cannot write a checkpoint of step {state['step']} into {folder}: {problem}; make room and --resume"
        ) from problem


def read_checkpoint(folder: Path, config: HeadsRun) -> dict[str, Any]:
    """What `write_checkpoint` kept of the same run.

    Raises:
        ValueError: there is none, it is damaged, or it is of another run.
    """
    file = folder / CHECKPOINT
    if not file.is_file():
        raise ValueError(f"{folder} holds no {CHECKPOINT} to go on from; start without --resume")
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:  # a damaged file raises whatever its pieces raise
        raise ValueError(f"{file} is truncated or damaged; start without --resume") from problem
    different = different_keys(state.get("config"), config, MAY_DIFFER)
    if different:
        raise ValueError(
            f"{', '.join(different)} must be as when the run in {file} began; put them back or start without --resume"
        )
    return state
