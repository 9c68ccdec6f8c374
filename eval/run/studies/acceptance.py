"""How far the drafts of every exit layer would be right: exact, from what each layer would have picked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.bounds import runs
from eval.run.studies.material import Material
from eval.traces import Trace

MOST = 8  # drafted tokens


def study(material: Material) -> dict[str, Any]:
    """The record: per exit layer, `joint` and `conditional` by draft position 1..MOST, see `acceptance`."""
    traces = material.answers()
    return {
        "study": "acceptance",
        "num_layers": material.num_layers,
        "num_questions": len(traces),
        "num_tokens": sum(len(trace.tokens) for trace in traces),
        "exits": [{"exit_layer": e, **acceptance(traces, e)} for e in range(1, material.num_layers)],
    }


def acceptance(traces: Sequence[Trace], exit_layer: int) -> dict[str, list[float | None]]:
    """Acceptance of an exit layer's drafts along the outputs.

    Of the output positions with i tokens left: `joint[i - 1]` is the share from which the next i drafted tokens all are
    the output's, `conditional[i - 1]` the share of these among those from which the next i - 1 are. None where there
    is no such position.
    """
    lengths = [runs(trace.hits[exit_layer - 1]) for trace in traces]
    counts = [_counts(lengths, i) for i in range(1, MOST + 1)]
    return {
        "joint": [right / places if places else None for right, _, places in counts],
        "conditional": [right / before if before else None for right, before, _ in counts],
    }


def _counts(lengths: Sequence[np.ndarray], i: int) -> tuple[int, int, int]:
    """Of runs of right tokens by position, where i tokens are left: those of at least i, of at least i - 1, all."""
    places = np.concatenate([of_one[: max(0, len(of_one) - i + 1)] for of_one in lengths])
    return int((places >= i).sum()), int((places >= i - 1).sum()), len(places)
