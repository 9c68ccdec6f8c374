"""Results of self-checks, kept in the cache folder: a file that was checked once is not checked again."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import torch
import transformers

from selfspec.executors.cpu.install import Choice
from selfspec.executors.cuda.body_choice import BodyChoice
from selfspec.files import write_whole
from selfspec.kernels import compiler
from selfspec.kernels.machine import cache_folder, warn_not_kept
from selfspec.model.fingerprint import device_name
from selfspec.version import __version__

FOLDER = "checked"
Chosen = TypeVar("Chosen", Choice, BodyChoice)


def read(source: str, kind: type[Chosen]) -> Chosen | None:
    """What was chosen for a file; None where that is not known.

    Args:
        source: `source_of` the file and of how it is opened.
        kind: of choice.
    """
    try:
        return kind(**json.loads(_file(source).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write(source: str, choice: Choice | BodyChoice) -> None:
    """Keep a choice for the next time."""
    try:
        file = _file(source)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, lambda stream: stream.write(json.dumps(choice._asdict()).encode()))
    except OSError as problem:
        warn_not_kept(problem)


def source_of(*parts: object) -> str:
    """A key of everything that a check depends on: these parts, the machine, and the versions of what runs."""
    versions = torch.__version__, transformers.__version__, _triton(), __version__, compiler.version()
    about = json.dumps([*map(str, parts), *versions, device_name(torch.device("cpu")), torch.get_num_threads()])
    return hashlib.sha256(about.encode()).hexdigest()[:16]


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _file(source: str) -> Path:
    return cache_folder() / FOLDER / f"{source}.json"
