"""Every policy by exact replay at this machine's costs, beside what could have been."""

from __future__ import annotations

from typing import Any

from eval.compare import compare
from eval.config import MEASURED, ReplayConfig
from eval.run.studies.material import Material
from eval.tasks import Recorded


def study(material: Material) -> dict[str, Any]:
    """The record; every question from a fresh start, speedups over plain decoding of all of them together."""
    traces, costs, target = material.answers(), material.costs(), material.target
    length = max(len(trace.tokens) for trace in traces)
    task = Recorded("run", traces, costs, target.default_exit_layer, target.default_num_draft_tokens)
    config = ReplayConfig(lengths=(length,), head_layers=(MEASURED,), temperature=material.temperature)
    material.say(f"policies: replaying {len(traces)} questions")
    (section,) = compare([task], config, lambda text: None)
    rows = [{"name": row["name"], "kind": row["kind"], "speedup": row["mean"]} for row in section["rows"]]
    return {"study": "policies", "length": length, "rows": rows, "num_questions": len(traces)}
