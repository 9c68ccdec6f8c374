"""Copies of the first layers and the head with weights rounded to 4 bits, that drafts alone are written by.

What they write is judged by all layers as they are, as a draft by lookup is, so that rounding costs agreement, never a
token of the output (drafts by a more quantised self: QSpec, arXiv 2410.11305). Keys and values that they leave in the
cache are written over by that verification.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from selfspec.executors.cpu.packed import Packed, pack_layer
from selfspec.kernels import compiled_call as c
from selfspec.kernels.room import LargePageAllocator
from selfspec.model.llama_weights import Layer, Linear


class PackedInt4(Packed):
    """A product's weights in 4 bits, of which each output's GROUP inputs share a scale: see `kernels/cpu/nibbles.h`."""

    def _kind(self) -> int:
        return c.INT4


class RoundedLayers:
    """Layers and head of a compiled body in 4 bits, as many as were asked for so far.

    They take memory, a seventh of float32's, once they are asked for.
    """

    def __init__(self, layers: Sequence[Layer], head: Linear) -> None:
        self._given, self._head_weight = layers, head
        self._room = LargePageAllocator()
        self._layers: list[tuple[Packed, ...]] = []
        self._head: PackedInt4 | None = None
        self._lock = threading.Lock()  # several threads may draft

    @property
    def head(self) -> Packed:
        with self._lock:
            if self._head is None:
                self._head = PackedInt4([self._head_weight], self._room)
            return self._head

    def structs(self, layers: Any, count: int) -> Any:
        """The first `count` of a compiled body's layers for a cache, with rounded weights instead of its own."""
        with self._lock:
            while len(self._layers) < count:
                self._layers.append(pack_layer(self._given[len(self._layers)], PackedInt4, self._room))
        made = (c.Layer * count)()
        for i, products in enumerate(self._layers[:count]):
            ctypes.memmove(ctypes.byref(made[i]), ctypes.byref(layers[i]), ctypes.sizeof(c.Layer))
            made[i].qkv, made[i].o, made[i].gate_up, made[i].down = (one.struct for one in products)
        return made

    def fill(self) -> None:
        """Copy the weights as they are now."""
        for one in [*([] if self._head is None else [self._head]), *(p for layer in self._layers for p in layer)]:
            one.fill()
