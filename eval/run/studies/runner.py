"""Make the studies that a run folder does not have yet; each file is there as a whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.run.config import STUDY_SIZES
from eval.run.lines import FullError, replace_text
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


def missing(folder: Path, names: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """Those of the named studies that the folder does not have, or has of other sizes (see `run_studies`)."""
    return [name for name in names if not _is_made(study_path(folder, name), sizes)]


def _is_made(path: Path, sizes: Mapping[str, int]) -> bool:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and all(found.get(key, STUDY_SIZES[key]) == size for key, size in sizes.items())


def run_studies(
    folder: Path, names: Sequence[str], sizes: Mapping[str, int], opened: Callable[[], Material], say: Say
) -> None:
    """Make the named studies, in place of what is there; one that this model cannot do leaves the sentence why in place
    of its figures.

    Args:
        sizes: study_questions and study_tokens, which every file keeps; in one that lacks them they are the defaults.
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
        if study_path(folder, name).exists():
            say(f"study {name}: measured anew, its file is not of {' and '.join(f'{k} {n}' for k, n in sizes.items())}")
        try:
            record = measured(name)
        except FullError:
            raise
        except Exception as problem:  # the answers are worth more than a figure
            said = f"{problem}" if isinstance(problem, ValueError) else f"{type(problem).__name__}: {problem}"
            record = {"study": name, "error": " ".join(said.split())}
            say(f"study {name}: {record['error']}")
        replace_text(study_path(folder, name), json.dumps({**record, **sizes}, indent=1) + "\n")
