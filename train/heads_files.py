"""The files of a run that trains exit heads, from which a run that was killed goes on: its texts and its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from selfspec.files import write_whole
from train.configuration import differences
from train.errors import RunFailed
from train.heads_config import MAY_DIFFER, HeadsRun

CHECKPOINT, TEXTS = "exit_heads.checkpoint.pt", "exit_heads.texts.jsonl"


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint.

    Raises:
        RunFailed: it cannot be written; the earlier checkpoint is unchanged.
    """
    try:
        write_whole(folder / CHECKPOINT, lambda stream: torch.save(state, stream))
    except (OSError, RuntimeError) as problem:  # torch's writer has its own error for a full disk
        raise RunFailed(
            f"cannot write a checkpoint of step {state['step']} into {folder}: {problem}; free space and use --resume"
        ) from problem


def read_checkpoint(folder: Path, config: HeadsRun) -> dict[str, Any] | None:
    """Read the checkpoint of the same run; None: the run was stopped before the first one.

    Raises:
        ValueError: the folder holds nothing of a run, or the checkpoint is damaged or belongs to another run.
    """
    file = folder / CHECKPOINT
    if not file.is_file():
        if (folder / TEXTS).is_file():
            return None
        raise ValueError(f"{folder} holds no {CHECKPOINT} or {TEXTS} to continue from; start without --resume")
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:  # damaged files raise various errors
        raise ValueError(f"{file} is truncated or damaged; start without --resume") from problem
    different = differences(state.get("config"), config, MAY_DIFFER)
    if different:
        raise ValueError(
            f"{', '.join(different)} must be as when the run in {file} began; restore them or start without --resume"
        )
    return state
