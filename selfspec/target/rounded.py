"""Copies of the first layers and the head with weights rounded to 8 bits, that drafts alone are written by.

What they write is judged by all layers as they are, as a draft by lookup is, so that rounding costs agreement, never a
token of the output (drafts by a more quantised self: QSpec, arXiv 2410.11305). Keys and values that they leave in the
cache are written over by that verification.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from selfspec.kernels import compiled_call as c
from selfspec.kernels.room import Room
from selfspec.target.lean import Layer, Linear
from selfspec.target.packed import Packed, pack_layer


class Rounded(Packed):
    """A product's weights in 8 bits, each output's with a scale of its own: see `kernels/cpu/bytes.h`."""

    def _kind(self) -> int:
        return c.INT8

    def _make(self, kind: int) -> None:
        super()._make(kind)
        with torch.inference_mode(False):
            self._scales = self._room.zeros(self._num_panels * self._panel)
        self.struct.scales = self._scales.data_ptr()

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._scales.nbytes


class RoundedLayers:
    """Layers and head of a compiled body in 8 bits, as many as were asked for so far.

    They take memory, a quarter of float32's, once they are asked for.
    """

    def __init__(self, layers: Sequence[Layer], head: Linear) -> None:
        self._given, self._head_weight = layers, head
        self._room = Room()
        self._layers: list[tuple[Packed, ...]] = []
        self._head: Rounded | None = None
        self._lock = threading.Lock()  # several threads may draft

    @property
    def head(self) -> Packed:
        with self._lock:
            if self._head is None:
                self._head = Rounded([self._head_weight], self._room)
            return self._head

    def structs(self, layers: Any, count: int) -> Any:
        """The first `count` of a compiled body's layers for a cache, with rounded weights instead of its own."""
        with self._lock:
            while len(self._layers) < count:
                self._layers.append(pack_layer(self._given[len(self._layers)], Rounded, self._room))
        made = (c.Layer * count)()
        for i, products in enumerate(self._layers[:count]):
            ctypes.memmove(ctypes.byref(made[i]), ctypes.byref(layers[i]), ctypes.sizeof(c.Layer))
            made[i].qkv, made[i].o, made[i].gate_up, made[i].down = (one.struct for one in products)
        return made

    def fill(self) -> None:
        """Copy the weights as they are now."""
        for one in [*([] if self._head is None else [self._head]), *(p for layer in self._layers for p in layer)]:
            one.fill()
