"""`BlockViews`: the model's own modules in blocks of a constant number of tokens, for recordings of any family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.executors.cuda.exact_body import filled_layout
from selfspec.executors.cuda.static_rows import StaticRows
from selfspec.kernels.layout import Layout
from selfspec.kernels.suite import Kernels
from selfspec.model.kv_cache import PackedRows
from selfspec.model.row_counts import fill_up
from selfspec.model.stack import Taps


class BlockViews:
    """Runs the views over `StaticRows`, block by block, so that shapes are constant; `run` does what `Stack.run` does.

    Args:
        stack: a `selfspec.model.stack.Stack`.
        kernels: those of `exact_body.with_fixed_order`.
        rows: tokens of a block.
    """

    num_bytes = 0

    def __init__(self, stack: Any, kernels: Kernels, rows: int) -> None:
        self.kernels, self.rows = kernels, rows
        self._run_views = stack.run_views  # `run_here` would call this body

    def run(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None = None) -> Tensor:
        """Run layers [start, stop); see `Stack.run`."""
        assert isinstance(rows, StaticRows)
        parts, seen = list[Tensor](), list[Taps]()
        for at in range(0, len(given), self.rows):
            layout = filled_layout(_part(rows.layout, at, at + self.rows), self.rows)
            block, tapped = StaticRows(rows.cache, layout, self.kernels), Taps(dict.fromkeys(taps or ()))
            filled = fill_up(given[at : at + self.rows], self.rows)
            parts.append(self._run_views(block, start, stop, filled, tapped or None))
            seen.append(tapped)
        if taps is not None:
            found = {depth: [one[depth] for one in seen] for depth in taps if seen[0][depth] is not None}
            taps.update({depth: torch.cat(states)[: len(given)] for depth, states in found.items()})  # type: ignore[arg-type]
        return torch.cat(parts)[: len(given)]

    def refresh(self, deeply: bool = False) -> None:
        """The views read the model's own weights."""


def _part(layout: Layout, at: int, end: int) -> Layout:
    """The layout of a call's places [at, end). Rows that go on after them hold the tokens up to there."""
    if at == 0 and end >= len(layout.rows):
        return layout
    low, high = (torch.minimum((edge - layout.starts).clamp(min=0), layout.counts) for edge in (at, end))
    return layout._replace(
        starts=(layout.starts - at).clamp(min=0),
        counts=high - low,
        lengths=layout.lengths - layout.counts + high,
        rows=layout.rows[at:end],
        slots=layout.slots[at:end],
        positions=layout.positions[at:end],
    )
