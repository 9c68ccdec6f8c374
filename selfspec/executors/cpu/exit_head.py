"""`PackedExitHead`: a trained head of an exit layer, packed for compiled drafts."""

from __future__ import annotations

from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from selfspec.executors.cpu.packed import Packed
from selfspec.kernels import compiled_call as c
from selfspec.kernels.large_pages import LargePageAllocator
from selfspec.model.exit_heads import EPS, ExitHead, ExitHeads
from selfspec.model.llama_weights import Linear


class PackedExitHead:
    """The packed products of a head, and its norm in float32.

    Attributes:
        struct: the structure for compiled functions.
    """

    def __init__(self, head: ExitHead) -> None:
        memory = LargePageAllocator()
        self._norm = cast(Tensor, head.norm)
        self._gate_up = Packed([Linear(head.gate, None), Linear(head.up, None)], memory, paired=True)
        self._down = Packed([Linear(head.down, None)], memory)
        self._weights = [*head.parameters()]
        with torch.inference_mode(False):  # used in later calls, outside of inference mode, too
            self._norm_copy = self._norm.detach().to(torch.float32, copy=True)
        self.struct = c.ExitHead(self._gate_up.struct, self._down.struct, self._norm_copy.data_ptr(), EPS)
        self._num_edits = self._count_edits()

    def refresh(self) -> None:
        """Pack the weights again if they were edited in place since the last call, as online learning does."""
        if (num_edits := self._count_edits()) != self._num_edits:
            self._gate_up.fill()
            self._down.fill()
            self._norm_copy.copy_(self._norm.detach())
            self.struct.gate_up, self.struct.down = self._gate_up.struct, self._down.struct
            self._num_edits = num_edits

    def _count_edits(self) -> int:
        return sum(0 if weight.is_inference() else weight._version for weight in self._weights)


class PackedExitHeads:
    """The packed heads of a body, made at their first use."""

    def __init__(self) -> None:
        self._packed: WeakKeyDictionary[ExitHead, PackedExitHead] = WeakKeyDictionary()

    def of(self, heads: ExitHeads | None, exit_layer: int) -> PackedExitHead | None:
        """The packed head of an exit layer with its current weights; None: the layer has none."""
        if heads is None or exit_layer not in heads.layers:
            return None
        head = cast(ExitHead, heads.heads[str(exit_layer)])
        packed = self._packed.get(head)
        if packed is None:
            packed = self._packed[head] = PackedExitHead(head)
        packed.refresh()
        return packed
