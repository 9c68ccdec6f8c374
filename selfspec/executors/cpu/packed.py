"""Weights in the order that the compiled products read them, and as small as they can be without losing any."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.kernels import compiled_call as c
from selfspec.kernels.room import LargePageAllocator
from selfspec.model.llama_weights import Layer, Linear

WHOLE = 1 << 40  # more outputs than a weight has: no gap after any of them


class Packed:
    """A product's weights, copied: in float32, or in half the memory where every one of them is a bfloat16 number.

    Checkpoints mostly hold bfloat16, so that in float32 the lower half of every weight is zero. Of weights that are
    bfloat16 themselves what they are multiplied by may be rounded to it, as it is in the model's own forward: where the
    processor has instructions for such products, twice as fast.

    Args:
        parts: weights `[out, in]` with the same input, whose outputs follow each other.
        room: where to put them; weights that are read one after another are best put into one.
        paired: there are two of one size, a gate and what it gates, and the outputs are `silu(gate) * up`.

    Attributes:
        struct: what the compiled functions are told; another after a `fill` that changed its kind.
    """

    def __init__(self, parts: Sequence[Linear], room: LargePageAllocator, paired: bool = False) -> None:
        self._panel = int(c.functions().selfspec_panel())
        half = self._panel // 2
        self._parts, self._room = parts, room
        self._shapes = [part.weight.shape for part in parts]
        self._lanes, self._stride = (half, self._panel) if paired else (WHOLE, 0)
        self.num_outputs = len(parts[0].weight) if paired else sum(len(part.weight) for part in parts)
        self._num_panels = -(-self.num_outputs // (half if paired else self._panel))
        biased = any(part.bias is not None for part in parts)
        with torch.inference_mode(False):  # it outlives the call that asked for it
            outputs = self._num_panels * self._panel
            self.bias = torch.zeros(outputs, dtype=torch.float32, device="cpu") if biased else None
        self._make(self._kind())
        self._copy()

    def fill(self) -> None:
        """Copy the weights as they are now."""
        kind = self._kind()
        if kind != self.struct.kind:
            self._make(kind)
        self._copy()

    @property
    def num_bytes(self) -> int:
        """Of weights, as far as they are read for a token, and biases."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def _kind(self) -> int:
        whole = all(fits_half(part.weight) for part in self._parts)
        rounds = all(part.weight.dtype == torch.bfloat16 for part in self._parts)
        return int(c.functions().selfspec_smallest(rounds)) if whole else c.FULL

    def _make(self, kind: int) -> None:
        bias = None if self.bias is None else self.bias.data_ptr()
        self.struct = c.Product(None, bias, self._parts[0].weight.shape[1], self.num_outputs, kind)
        words = c.functions().selfspec_packed_words(ctypes.byref(self.struct), self._num_panels)
        with torch.inference_mode(False):
            self.weight = self._room.zeros(words)
        self.struct.packed = self.weight.data_ptr()

    def _copy(self) -> None:
        at = 0
        for part, shape in zip(self._parts, self._shapes, strict=True):
            weight: Tensor = part.weight.detach().float().contiguous()
            size = len(weight)
            if weight.shape != shape:
                raise ValueError(
                    f"a weight {list(shape)} was replaced by one {list(weight.shape)}; load the model again"
                )
            c.functions().selfspec_pack(
                *(weight.data_ptr(), size, ctypes.byref(self.struct)),
                *(at, self._lanes, self._stride, torch.get_num_threads()),
            )
            if part.bias is not None and self.bias is not None:
                outputs = torch.arange(size)
                places = at + outputs // self._lanes * self._stride + outputs % self._lanes
                self.bias[places] = part.bias.detach().float()
            at += self._lanes if self._stride else size


def pack_layer(x: Layer, kind: type[Packed], room: LargePageAllocator) -> tuple[Packed, Packed, Packed, Packed]:
    """A layer's products, in the order that `kernels/cpu/model.h` has them."""
    qkv, out = kind([x.q, x.k, x.v], room), kind([x.o], room)
    return qkv, out, kind([x.gate, x.up], room, paired=True), kind([x.down], room)


def fits_half(weight: Tensor) -> bool:
    """Whether bfloat16 holds every number of a weight, as it is in float32, exactly."""
    if weight.dtype == torch.bfloat16:
        return True
    weight = weight.detach().float().contiguous()
    return bool(c.functions().selfspec_fits_half(weight.data_ptr(), weight.numel()))
