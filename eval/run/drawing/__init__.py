"""Figures of a run folder: what its summary and the results of its studies look like.

Every figure is drawn only where its data are there. Data that are broken cost their figure, never the report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eval.run.drawing import maps, speeds
from eval.run.drawing.paper import Drawing, Sketch, draw

Sketcher = Callable[[Mapping[str, Any]], Sketch | None]
OF_SUMMARY: dict[str, Sketcher] = {"speedup_by_category": speeds.speedup_by_category, "stages": maps.stages}
OF_STUDY: dict[str, Sketcher] = {
    "acceptance": maps.acceptance,
    "grid": maps.grid,
    "batch": speeds.batch,
    "policies": speeds.policies,
}
NAMES = (*OF_SUMMARY, *OF_STUDY)


@dataclass
class Drawn:
    """What came of a run's figures.

    Args:
        figures: by name.
        notes: why a figure that could be expected is not there, in a sentence, by name.
        remark: why there are no figures at all, in a sentence; empty where there could be.
    """

    figures: dict[str, Drawing] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    remark: str = ""


def draw_all(folder: Path, summary: Mapping[str, Any]) -> Drawn:
    """All figures of a run folder, none of them written yet."""
    drawn = Drawn()
    if find_spec("matplotlib") is None:
        drawn.remark = "There are no figures, for want of matplotlib: pip install matplotlib, then report again."
    for name in NAMES:
        try:
            data = summary if name in OF_SUMMARY else _study(folder / "studies" / f"{name}.json")
            if data is None:
                continue
            if "error" in data:
                drawn.notes[name] = f"The study {name} came to nothing: {data['error']}"
            elif not drawn.remark:
                sketch = {**OF_SUMMARY, **OF_STUDY}[name](data)
                if sketch is not None:
                    drawn.figures[name] = draw(name, sketch)
        except Exception as problem:  # whatever a file holds, the report is written
            of = "summary.json" if name in OF_SUMMARY else f"studies/{name}.json"
            drawn.notes[name] = f"{of} cannot be drawn ({type(problem).__name__}: {problem})."
    return drawn


def _study(path: Path) -> Mapping[str, Any] | None:
    """What a study has written down; None where it has not run.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON object.
    """
    if not path.exists():
        return None
    found = json.loads(path.read_text("utf-8"))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found
