"""Tables of rotary angles for compiled layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

INITIAL_POSITIONS = 512  # positions in the first tables


class RotaryTables:
    """cos and sin of positions, for each type of layer.

    Args:
        module: the model's rotary embedding.
        layer_types: the layers' types, where their angles differ; else None for every layer.
    """

    def __init__(self, module: Any, layer_types: Sequence[str | None]) -> None:
        self._module, self._kinds = module, sorted({*layer_types}, key=str)
        self._made = self._make(INITIAL_POSITIONS)

    @property
    def count(self) -> int:
        """The number of tables per position."""
        return len(self._kinds)

    def index(self, layer_type: str | None) -> int:
        """The number of the table of a type of layers."""
        return self._kinds.index(layer_type)

    def of(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of at least `length` positions, fp32 `[positions, tables, head_dim]` each.

        They grow by doubling. `sin` is negated in the first half of the head, as the rotation needs it. The caller
        keeps them: another thread may replace them here.
        """
        made = self._made
        if length > len(made[0]):
            made = self._made = self._make(1 << (length - 1).bit_length())
        return made

    def _make(self, length: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            positions = torch.arange(length, device="cpu")[None]
            like = torch.empty(1, 1, 1, dtype=torch.float32, device="cpu")  # of the results' dtype and device
            own = [{} if kind is None else {"layer_type": kind} for kind in self._kinds]
            parts = [self._module(like, position_ids=positions, **named) for named in own]
            cos, sin = (torch.stack([part[i][0] for part in parts], 1) for i in range(2))
            sin[..., : sin.shape[-1] // 2] *= -1
            return cos, sin
