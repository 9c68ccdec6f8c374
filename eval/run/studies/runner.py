"""Make the studies that a run folder does not have yet; each file is there as a whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eval.run.lines import replace_text
from eval.run.studies import acceptance, batch, grid, policies
from eval.run.studies.material import Material
from eval.timing import Say

STUDIES: dict[str, Callable[[Material], dict[str, Any]]] = {
    "acceptance": acceptance.study,
    "grid": grid.study,
    "batch": batch.study,
    "policies": policies.study,
}


def study_path(folder: Path, name: str) -> Path:
    return folder / "studies" / f"{name}.json"


def missing(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of the named studies that the folder does not have."""
    return [name for name in names if not study_path(folder, name).exists()]


def run_studies(folder: Path, names: Sequence[str], opened: Callable[[], Material], say: Say) -> None:
    """Make the named studies; one that this model cannot do leaves the sentence why in place of its figures.

    Args:
        opened: what gathers the material, called once.

    Raises:
        FullError: a file could not be written; the folder can be resumed.
    """
    shared: list[Material] = []

    def measured(name: str) -> dict[str, Any]:
        if not shared:
            shared.append(opened())
        return STUDIES[name](shared[0])

    for name in names:
        say(f"study: {name}")
        try:
            record = measured(name)
        except Exception as problem:  # the answers are worth more than a figure
            said = f"{problem}" if isinstance(problem, ValueError) else f"{type(problem).__name__}: {problem}"
            record = {"study": name, "error": " ".join(said.split())}
            say(f"study {name}: {record['error']}")
        replace_text(study_path(folder, name), json.dumps(record, indent=1) + "\n")
