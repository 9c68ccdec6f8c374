"""`Packed`: weights in the order in which compiled products read them, also of exit heads and of 4-bit copies."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from selfspec.kernels import compiled_call as c
from selfspec.kernels.large_pages import LargePageAllocator
from selfspec.model.exit_heads import EPS, ExitHead, ExitHeads
from selfspec.model.gguf_blocks import Blocks, BlockWeight
from selfspec.model.llama_weights import Layer, Linear, activation_bytes
from selfspec.model.quantized import dense

BLOCK = 32  # weights of a block of Q8_0
UNPAIRED = 1 << 40  # outputs before a gap; more than any weight has, so there is none


class Packed:
    """A packed copy of a product's weights, in the smallest lossless format.

    Where all parts come with the blocks of a GGUF file, these are packed as they are. Most other checkpoints hold
    bfloat16 numbers, so the lower half of every float32 weight is zero and is left out. For weights of dtype bfloat16,
    the product's inputs may be rounded to bfloat16, too, as in the model's own forward. That is twice as fast on
    processors that have instructions for it. All other weights are packed in float32.

    Args:
        parts: weights `[out, in]` with the same input; their outputs are concatenated.
        memory: allocates the packed weights. Weights that are read one after another should share it.
        paired: `parts` are the gate and up projections of an MLP, and the outputs are `silu(gate) * up`.

    Attributes:
        struct: the structure for compiled functions. A `fill` that changes the format replaces it.
        reads_blocks: whether parts that all have blocks are packed from these, without their weights' numbers.
    """

    reads_blocks = True

    def __init__(self, parts: Sequence[Linear], memory: LargePageAllocator, paired: bool = False) -> None:
        self._panel = int(c.functions().selfspec_panel())
        half = self._panel // 2
        self._parts, self._memory = parts, memory
        self._shapes = [part.weight.shape for part in parts]
        self._lanes, self._stride = (half, self._panel) if paired else (UNPAIRED, 0)
        self.num_outputs = len(parts[0].weight) if paired else sum(len(part.weight) for part in parts)
        self._num_panels = -(-self.num_outputs // (half if paired else self._panel))
        biased = any(part.bias is not None for part in parts)
        with torch.inference_mode(False):  # used in later calls, outside of inference mode, too
            outputs = self._num_panels * self._panel
            self.bias = torch.zeros(outputs, dtype=torch.float32, device="cpu") if biased else None
        self._allocate(self._kinds())
        self._pack()
        self._copy_biases()

    def fill(self) -> None:
        """Copy the current weights and biases of the model. What was packed from blocks stays: these never change.

        Raises:
            ValueError: the shape of a weight changed.
        """
        if self.struct.kind < c.MIXED or any(part.blocks is None for part in self._parts):
            kinds = self._kinds()
            if kinds != self._kinds_now:
                self._allocate(kinds)
            self._pack()
        self._copy_biases()

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and biases that a token reads."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def _kinds(self) -> list[int]:
        """The format of each part, or a single one: the smallest lossless ones. See `compiled_call.FULL`."""
        blocks = [part.blocks for part in self._parts if part.blocks is not None]
        if len(blocks) == len(self._parts):
            kinds = [c.BLOCKS[each.type] for each in blocks]
            if len(set(kinds)) == 1:
                return kinds[:1]
            if not self._stride and all(len(part.weight) % self._panel == 0 for part in self._parts):
                return kinds
        fits = all(fits_half(part.weight) for part in self._parts)
        may_round = all(part.weight.dtype == torch.bfloat16 for part in self._parts)
        return [int(c.functions().selfspec_smallest(may_round)) if fits else c.FULL]

    def _allocate(self, kinds: list[int]) -> None:
        self._kinds_now, inputs = kinds, self._parts[0].weight.shape[1]
        counts = [len(part.weight) // self._panel for part in self._parts] if len(kinds) > 1 else [self._num_panels]
        each = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        ends = [0, *accumulate(c.functions().selfspec_panel_bytes(kind, inputs) for kind in each)]
        places = [value for pair in zip(ends, [*each, 0], strict=True) for value in pair]
        self._panels = (ctypes.c_int64 * len(places))(*places) if len(kinds) > 1 else None
        panels = None if self._panels is None else ctypes.addressof(self._panels)
        bias = None if self.bias is None else self.bias.data_ptr()
        kind = c.MIXED if len(kinds) > 1 else kinds[0]
        digits = 1 if kind == c.INT4 else min(activation_bytes(part.weight) for part in self._parts)
        self.struct = c.Product(None, bias, inputs, self.num_outputs, kind, panels, digits)
        with torch.inference_mode(False):
            self.weight = self._memory.zeros(-(-ends[-1] // 4))
        self.struct.packed = self.weight.data_ptr()

    def _pack(self) -> None:
        at, lib, threads = 0, c.functions(), torch.get_num_threads()
        for part, shape in zip(self._parts, self._shapes, strict=True):
            size = len(part.weight)
            if part.weight.shape != shape:
                raise ValueError(
                    f"a weight {list(shape)} was replaced by one {list(part.weight.shape)}; load the model again"
                )
            places = (ctypes.byref(self.struct), at, self._lanes, self._stride, threads)
            if part.blocks is not None and self.struct.kind >= c.MIXED:
                data, rows = part.blocks.data, part.blocks.rows
                order = None if rows is None else rows.data_ptr()
                lib.selfspec_pack_blocks(data.data_ptr(), data.stride(0), order, size, *places)
            else:
                weight: Tensor = dense(part.weight.detach()).float().contiguous()
                lib.selfspec_pack(weight.data_ptr(), size, *places)
            at += self._lanes if self._stride else size

    def _copy_biases(self) -> None:
        at = 0
        for part in self._parts:
            outputs = torch.arange(len(part.weight))
            if part.bias is not None and self.bias is not None:
                places = at + outputs // self._lanes * self._stride + outputs % self._lanes
                self.bias[places] = part.bias.detach().float()
            at += self._lanes if self._stride else len(outputs)


def pack_layer(x: Layer, kind: type[Packed], memory: LargePageAllocator) -> tuple[Packed, Packed, Packed, Packed]:
    """A layer's packed products: qkv, o, gate_up and down."""
    qkv, out = kind([x.q, x.k, x.v], memory), kind([x.o], memory)
    return qkv, out, kind([x.gate, x.up], memory, paired=True), kind([x.down], memory)


def fits_half(weight: Tensor) -> bool:
    """Whether bfloat16 represents every number of a weight exactly."""
    if weight.dtype == torch.bfloat16:
        return True
    weight = dense(weight.detach()).float().contiguous()
    return bool(c.functions().selfspec_fits_half(weight.data_ptr(), weight.numel()))


def addresses_of(rows: Tensor) -> Any:
    """A C array of the addresses of a contiguous tensor's rows `[N, size]`."""
    first, step = rows.data_ptr(), rows.shape[1] * rows.element_size()
    return (ctypes.c_void_p * len(rows))(*range(first, first + len(rows) * step, step))


class PackedExitHead:
    """The packed products of a head, and its norm in float32. Its weights are rounded to 8 bits, as it only drafts.

    Attributes:
        struct: the structure for compiled functions.
    """

    def __init__(self, head: ExitHead) -> None:
        memory = LargePageAllocator()
        self.num_edits = edits_of(head)
        gate, up, down = (in_bytes(cast(Tensor, weight)) for weight in (head.gate, head.up, head.down))
        self._products = Packed([gate, up], memory, paired=True), Packed([down], memory)
        with torch.inference_mode(False):  # used in later calls, outside of inference mode, too
            self._norm = cast(Tensor, head.norm).detach().to(torch.float32, copy=True)
        self.struct = c.ExitHead(*(one.struct for one in self._products), self._norm.data_ptr(), EPS)


def edits_of(head: ExitHead) -> int:
    """The number of edits in place of a head's weights."""
    return sum(0 if weight.is_inference() else weight._version for weight in head.parameters())


def in_bytes(weight: Tensor) -> Linear:
    """A weight `[out, in]` in blocks of 32 signed bytes with a scale (Q8_0); as it is where 32 does not divide `in`."""
    count, width = weight.shape
    if width % BLOCK:
        return Linear(weight, None)
    with torch.inference_mode(False), torch.no_grad():
        numbers = weight.detach().float().clone().view(count, -1, BLOCK)
        scales = (numbers.abs().amax(-1, keepdim=True) / 127).half()
        bytes_ = (numbers / scales.float().clamp(min=1e-12)).round().clamp(-127, 127).to(torch.int8)
        data = torch.cat((scales.view(torch.uint8), bytes_.view(torch.uint8)), -1).view(count, -1)
        return Linear(BlockWeight(Blocks("Q8_0", data.contiguous()), activation_bytes=2), None)


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
        if packed is None or packed.num_edits != edits_of(head):  # by online learning
            packed = self._packed[head] = PackedExitHead(head)
        return packed


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

    def fill(self) -> None:
        """Copy the current weights of the model into the copies made so far."""
        for one in [*([] if self._head is None else [self._head]), *(p for layer in self._layers for p in layer)]:
            one.fill()
