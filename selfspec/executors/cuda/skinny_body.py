"""`SkinnyBody`: the layers of a Llama-shaped model in five launches each, for calls of few tokens.

A layer is: norm and product for queries, keys and values; rotation, KV write and attention; output product and sum;
norm, products for gate and up, and activation; down product and sum. Products have one order of sums for up to 64 rows,
and attention splits of a constant size: so a token's bits do not depend on the other tokens of the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.executors.cuda.device_work import SideStream
from selfspec.executors.cuda.fused_body import FusedBody, tap
from selfspec.executors.cuda.packed_linear import PackedLinear
from selfspec.executors.cuda.rounds import StaticRows
from selfspec.kernels.checks import SKINNY_ROWS
from selfspec.kernels.layout import SPLIT, Layout
from selfspec.model.kv_cache import PackedRows
from selfspec.model.llama_weights import Layer
from selfspec.model.split_model import Taps

MOST_PARTIAL_BYTES = 128 << 20  # of partial results of attention


class SkinnyBody(FusedBody):
    """Fused layers in five launches each for calls of at most `most_rows` places; longer calls take ten.

    Args:
        shares: the layers, with their packed weights; `unserved` says whether they can be run so.
        most_rows: 1 to 64.
        most_prefetched: in calls of at most so many places, the output product's weight is read into the device's cache
            while attention, which reads little, runs beside.
    """

    def __init__(self, shares: FusedBody, most_rows: int = SKINNY_ROWS, most_prefetched: int = 0) -> None:
        super().__init__(shares.weights, shares.kernels, shares.packing, shares)
        self.most_rows, self.most_prefetched = most_rows, most_prefetched
        kv_heads = len(self.weights.layers[0].k.weight) // self.weights.head_dim
        device = self.weights.embedding.device
        self._counters = torch.zeros(SKINNY_ROWS * kv_heads, dtype=torch.int32, device=device)
        self.side = SideStream(device)

    def __str__(self) -> str:
        prefetched = f", prefetch for up to {self.most_prefetched}" if self.most_prefetched else ""
        return f"fused, five launches for up to {self.most_rows} tokens{prefetched}"

    def run(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None = None) -> Tensor:
        """See `SplitModel.run`."""
        assert isinstance(rows, StaticRows)
        if not self.takes(rows.layout):
            return super().run(rows, start, stop, given, taps)
        prefetches = len(rows.layout.rows) <= self.most_prefetched
        hidden = given if start else self._embedded(given)
        squares = self.kernels.squares_of(hidden)
        for depth in range(start, stop):
            tap(taps, depth, start, hidden)
            qkv = self.qkv(depth, hidden, squares)
            if prefetches:
                self.prefetch(depth)
            attended = self.rotate_attend(rows, depth, qkv)
            hidden, squares = self.add(self.products[depth].o, attended, hidden)
            hidden, squares = self.add(self.products[depth].down, self.gated(depth, hidden, squares), hidden)
        if prefetches:
            self.side.join()
        tap(taps, stop, start, hidden)
        if stop < len(self.weights.layers):
            return hidden
        normed = self.kernels.add_norm(hidden, None, self.weights.norm)[1]
        assert normed is not None
        return normed

    def takes(self, layout: Layout) -> bool:
        """Whether a call's layers take five launches."""
        count, slots = len(layout.rows), len(layout.counts)
        heads = len(self.weights.layers[0].q.weight) // self.weights.head_dim
        partial = -(-layout.most_tokens // SPLIT) * count * heads * (4 * self.weights.head_dim + 8)
        is_small = count <= self.most_rows and slots * layout.most_new <= SKINNY_ROWS
        return is_small and partial <= MOST_PARTIAL_BYTES

    # The launches of a layer.

    def qkv(self, depth: int, hidden: Tensor, squares: Tensor) -> Tensor:
        """Queries, keys and values, `[N, (heads + 2 * kv_heads) * head_dim]`, of hidden states and their squares."""
        linear = self.products[depth].qkv
        assert linear.weight is not None
        norm = self.weights.layers[depth].norm
        return self.kernels.norm_product(hidden, squares, norm, linear.weight, linear.bias)

    def prefetch(self, depth: int) -> None:
        """Read the output product's weight beside what follows. `run` joins once, at its end."""
        weight = self.products[depth].o.weight
        assert weight is not None
        with self.side.fork():
            self.kernels.prefetch(weight)

    def rotate_attend(self, rows: StaticRows, depth: int, qkv: Tensor) -> Tensor:
        """See `FusedBody.attention`."""
        layer, given = self.weights.layers[depth], self.rotate_args(rows, depth, qkv)
        return self.kernels.rotate_attend(*given, layer.scale, self._counters, layer.window).flatten(1)

    def gated(self, depth: int, hidden: Tensor, squares: Tensor) -> Tensor:
        """The gated states of the MLP, `[N, inner]`, of hidden states and their squares."""
        weight, norm = self.products[depth].gate_up.weight, self.weights.layers[depth].mlp_norm
        assert weight is not None
        gate, up = weight.chunk(2)
        return self.kernels.gate_product(hidden, squares, norm, gate, up, self.weights.activation)

    def add(self, linear: PackedLinear, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states plus a product of a layer, and sums of their squares."""
        assert linear.weight is not None
        return self.kernels.product_add(x, linear.weight, linear.bias, hidden)


def unserved(body: FusedBody) -> str:
    """Why a model's layers cannot take five launches; "" if they can."""
    if body.packing == "none":
        return "the weights of products are not packed"
    return next((reason for reason in map(_unserved, body.weights.layers) if reason), "")


def _unserved(layer: Layer) -> str:
    if layer.post_norm is not None or any(norm is not None and norm.offset for norm in layer.norms):
        return "norms have offsets, or stand after products"
    if layer.gate.bias is not None or layer.up.bias is not None:
        return "gate and up have biases"
    shapes = {(len(one.weight), one.weight.shape[1]) for one in (layer.gate, layer.up)}
    return "" if len(shapes) == 1 else "gate and up have different shapes"
