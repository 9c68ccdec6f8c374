"""What is written down of a run: its summary, and the reports made of that alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.run import report
from eval.run.records import replace_text


def write(folder: Path, summary: dict[str, Any]) -> str:
    """`summary.json` and `report.md`; the report's text.

    Raises:
        FullError: they cannot be written.
    """
    text = report.render(summary)
    replace_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    replace_text(folder / "report.md", text)
    return text
