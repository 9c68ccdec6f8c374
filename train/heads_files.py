"""The files of a run that trains exit heads, from which a run that was killed goes on: its texts and its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from selfspec.files import write_whole
from train.config_file import different_keys
from train.errors import RunFailed
from train.heads_config import MAY_DIFFER, HeadsRun

CHECKPOINT, TEXTS = "exit_heads.checkpoint.pt", "exit_heads.texts.jsonl"


class Task(NamedTuple):
    """A prompt to continue. The output depends on these fields and the model alone."""

    prompt: tuple[int, ...]
    count: int  # new tokens, at most
    temperature: float
    seed: int


class Written:
    """What a model wrote so far, by task; every output is in the file as soon as it is added.

    A file of a model with other weights is begun anew, and a line that a killed run left unfinished does not count.

    Raises:
        RunFailed: the file cannot be read or written.
    """

    def __init__(self, file: Path, weights: str) -> None:
        self._file, self._known = file, dict[Task, list[int]]()
        try:
            content = file.read_bytes() if file.is_file() else b""
            head, *lines = content.split(b"\n")[:-1] or [b""]
            if head != (begin := json.dumps({"weights": weights}).encode()):
                file.write_bytes(begin + b"\n")
                return
            for line in lines:
                prompt, count, temperature, seed, tokens = json.loads(line)
                self._known[Task(tuple(prompt), count, temperature, seed)] = tokens
            with file.open("rb+") as opened:
                opened.truncate(content.rindex(b"\n") + 1)
        except (OSError, ValueError) as problem:
            raise RunFailed(f"cannot keep texts in {file}: {problem}; remove it or free space") from problem

    def get(self, task: Task) -> list[int] | None:
        """The output of a task; None: it is not written yet."""
        return self._known.get(task)

    def add(self, task: Task, tokens: Sequence[int]) -> None:
        """Keep the output of a task."""
        self._known[task] = list(tokens)
        try:
            with self._file.open("a") as opened:
                opened.write(json.dumps([*task, list(tokens)]) + "\n")
        except OSError as problem:
            raise RunFailed(f"cannot write {self._file}: {problem}; free space and use --resume") from problem


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
    different = different_keys(state.get("config"), config, MAY_DIFFER)
    if different:
        raise ValueError(
            f"{', '.join(different)} must be as when the run in {file} began; restore them or start without --resume"
        )
    return state
