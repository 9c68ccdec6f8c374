"""Weights in the order that the compiled products read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.kernels import compiled_call as c
from selfspec.kernels.room import Room
from selfspec.target.lean import Linear

WHOLE = 1 << 40  # more outputs than a weight has: no gap after any of them


class Packed:
    """A product's weights, copied: panels of outputs, `[panels, in, panel size]`, float32.

    Args:
        parts: weights `[out, in]` with the same input, whose outputs follow each other.
        room: where to put them; weights that are read one after another are best put into one.
        paired: there are two of one size, a gate and what it gates, and the outputs are `silu(gate) * up`.
    """

    def __init__(self, parts: Sequence[Linear], room: Room, paired: bool = False) -> None:
        panel, inputs = int(c.functions().selfspec_panel()), parts[0].weight.shape[1]
        half = panel // 2
        self._parts = parts
        self._lanes, self._stride = (half, panel) if paired else (WHOLE, 0)
        self.num_outputs = len(parts[0].weight) if paired else sum(len(part.weight) for part in parts)
        panels = -(-self.num_outputs // (half if paired else panel))
        biased = any(part.bias is not None for part in parts)
        with torch.inference_mode(False):  # it outlives the call that asked for it
            self.weight = room.zeros(panels, inputs, panel)
            self.bias = torch.zeros(panels * panel, dtype=torch.float32, device="cpu") if biased else None
        bias = None if self.bias is None else self.bias.data_ptr()
        self.struct = c.Product(self.weight.data_ptr(), bias, inputs, self.num_outputs)
        self.fill()

    def fill(self) -> None:
        """Copy the weights as they are now."""
        at = 0
        for part in self._parts:
            weight: Tensor = part.weight.detach()
            size, inputs = weight.shape
            c.functions().selfspec_pack(
                *(weight.data_ptr(), size, inputs, self.weight.data_ptr()),
                *(at, self._lanes, self._stride, torch.get_num_threads()),
            )
            if part.bias is not None and self.bias is not None:
                outputs = torch.arange(size)
                self.bias[at + outputs // self._lanes * self._stride + outputs % self._lanes] = part.bias.detach()
            at += self._lanes if self._stride else size

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes
