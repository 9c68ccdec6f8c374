"""Tables of rotary angles for fused layers, at addresses that never change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Tables = dict[str | None, tuple[Tensor, Tensor]]


class RotaryTables:
    """cos and sin of positions, for each type of layer.

    Tables are never dropped, since recordings read them. Their lengths are powers of two, so all of them together take
    at most twice the memory of the longest.

    Args:
        module: the model's rotary embedding.
        layer_types: the layers' types, where their angles differ; else None for every layer.
        like: a tensor of the tables' dtype and device.
    """

    def __init__(self, module: Any, layer_types: Sequence[str | None], like: Tensor) -> None:
        self._module, self._kinds, self._like = module, sorted({*layer_types}, key=str), like
        self._made: dict[int, Tables] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(one.nbytes for tables in self._made.values() for pair in tables.values() for one in pair)

    def of(self, length: int) -> Tables:
        """cos and sin of at least `length` positions by layer type, `[positions, head_dim / 2]` each."""
        capacity = min((made for made in self._made if made >= length), default=1 << max(0, length - 1).bit_length())
        if capacity not in self._made:
            self._made[capacity] = {kind: self._make(capacity, kind) for kind in self._kinds}
        return self._made[capacity]

    def _make(self, length: int, kind: str | None) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self._like.device)[None]
        named = {} if kind is None else {"layer_type": kind}
        angles = self._module(self._like[:1, None], position_ids=positions, **named)
        cos, sin = (one[0].chunk(2, -1)[0].contiguous() for one in angles)  # both halves of a head have the same angles
        return cos, sin
