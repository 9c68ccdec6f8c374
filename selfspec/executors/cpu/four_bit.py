"""Copies of the first layers and the head with weights rounded to 4 bits, for drafts only.

All layers, with unrounded weights, verify these drafts, as they verify drafts by lookup. Rounding may lower acceptance
but never changes the output (drafting by a quantised copy of the model: QSpec, arXiv 2410.11305). The verification
overwrites the keys and values that the copies leave in the cache.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Sequence
from typing import Any

from selfspec.executors.cpu.packed import Packed, pack_layer
from selfspec.kernels import compiled_call as c
from selfspec.kernels.large_pages import LargePageAllocator
from selfspec.model.llama_weights import Layer, Linear


class PackedInt4(Packed):
    """A product's weights in 4 bits. Each block of an output's inputs has one scale; see `kernels/cpu/blocks.h`."""

    reads_blocks = False

    def _kinds(self) -> list[int]:
        return [c.INT4]


class RoundedLayers:
    """4-bit copies of a compiled body's layers and head. Each is made at its first use.

    A copy takes a seventh of the memory of float32 weights.
    """

    def __init__(self, layers: Sequence[Layer], head: Linear) -> None:
        self._weights, self._head_weight = layers, head
        self._memory = LargePageAllocator()
        self._layers: list[tuple[Packed, ...]] = []
        self._head: PackedInt4 | None = None
        self._lock = threading.Lock()  # several threads may draft

    @property
    def head(self) -> Packed:
        """The 4-bit head."""
        with self._lock:
            if self._head is None:
                self._head = PackedInt4([self._head_weight], self._memory)
            return self._head

    def structs(self, layers: Any, count: int) -> Any:
        """The structures of the first `count` layers with 4-bit weights.

        Args:
            layers: the structures of the same layers with unrounded weights, whose other fields are copied.
        """
        with self._lock:
            while len(self._layers) < count:
                self._layers.append(pack_layer(self._weights[len(self._layers)], PackedInt4, self._memory))
        made = (c.Layer * count)()
        for i, products in enumerate(self._layers[:count]):
            ctypes.memmove(ctypes.byref(made[i]), ctypes.byref(layers[i]), ctypes.sizeof(c.Layer))
            made[i].qkv, made[i].o, made[i].gate_up, made[i].down = (one.struct for one in products)
        return made

    def fill(self, edited: Collection[int] = ()) -> None:
        """Copy the current weights of the model into the copies made so far; `edited` as for `Packed.fill`."""
        self._weights = [layer.without(edited) for layer in self._weights]
        self._head_weight = self._head_weight.without(edited)
        for one in [*([] if self._head is None else [self._head]), *(p for layer in self._layers for p in layer)]:
            one.fill(edited)
