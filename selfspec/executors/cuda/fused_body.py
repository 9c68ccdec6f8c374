"""`FusedBody`: the layers of a Llama-shaped model in ten launches each, for recordings.

A layer is: addition and norm, product for queries, keys and values, rotation and KV write, attention and its
combination, output product, addition and norm, product for gate and up, activation, down product. The model's own
modules take about 33 launches. Rounding is that of these modules, operation by operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.executors.cuda.packed_linear import PackedLinear, Packing
from selfspec.executors.cuda.rounds import StaticRows
from selfspec.kernels.layout import Layout, Norm, Rotation
from selfspec.kernels.suite import Kernels
from selfspec.model.kv_cache import PackedRows
from selfspec.model.llama_weights import Layer, Linear, LlamaWeights
from selfspec.model.split_model import Taps

Tables = dict[str | None, tuple[Tensor, Tensor]]  # cos and sin by layer type, at addresses that never change


class FusedBody:
    """Layers of a Llama-shaped model over `StaticRows`; `run` does what `SplitModel.run` does.

    Args:
        weights: the model's weights, in a dtype of `kernels.checks.LAYER_DTYPES`.
        kernels: those of layers.
        packing: how weights of products with the same input are put together, see `PackedLinear`.
        shares: another body of the same weights and packing, whose packed weights and tables this one uses.
    """

    def __init__(
        self, weights: LlamaWeights, kernels: Kernels, packing: Packing, shares: FusedBody | None = None
    ) -> None:
        self.weights, self.kernels, self.packing = weights, kernels, packing
        self.products: list[Products]
        self._rotary: RotaryTables
        if shares is not None:
            self.products, self._rotary = shares.products, shares._rotary
            return
        self.products = [Products(*(PackedLinear(one, packing) for one in _groups(layer))) for layer in weights.layers]
        types = [layer.layer_type for layer in weights.layers]
        self._rotary = RotaryTables(weights.rotary, types, weights.embedding)

    def __str__(self) -> str:
        return "fused"

    @staticmethod
    def bytes_of(weights: LlamaWeights) -> int:
        """Bytes that packed copies of a model's weights take."""
        return sum(PackedLinear.bytes_of(one) for layer in weights.layers for one in _groups(layer))

    @property
    def linears(self) -> Iterator[PackedLinear]:
        """The products of all layers."""
        return (one for own in self.products for one in own)

    def product(self, linear: PackedLinear, x: Tensor) -> Tensor:
        """A product with the weight of one or several linear layers, `[N, out]`; every product of `run` is made here.

        Args:
            x: `[N, in]`.
        """
        return linear(x)

    def run(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None = None) -> Tensor:
        """Run layers [start, stop); see `SplitModel.run`."""
        assert isinstance(rows, StaticRows)
        layers = self.weights.layers
        assert 0 <= start < stop <= len(layers), f"no layers [{start}, {stop}) among {len(layers)}"
        hidden = given if start else self._embedded(given)
        # The output of the last sublayer, and the norm that it still lacks. The next kernel adds it to `hidden`.
        branch: Tensor | None = None
        post: Norm | None = None
        for depth in range(start, stop):
            layer, products = layers[depth], self.products[depth]
            hidden, normed = self._add_norm(hidden, branch, layer.norm, post)
            tap(taps, depth, start, hidden)
            attended = self.attention(rows, depth, self.product(products.qkv, normed))
            branch = self.product(products.o, attended)
            hidden, normed = self._add_norm(hidden, branch, layer.mlp_norm, layer.post_norm)
            gate_up = self.product(products.gate_up, normed)
            branch = self.product(products.down, self.kernels.gate(gate_up, self.weights.activation))
            post = layer.post_mlp_norm
        hidden, last = self.kernels.add_norm(hidden, branch, self.weights.norm if stop == len(layers) else None, post)
        tap(taps, stop, start, hidden)
        return hidden if last is None else last

    def refresh(self, deeply: bool = False) -> None:
        """Pack the weights again that were edited in place since the last call; see `PackedLinear.refresh`."""
        for one in self.linears:
            one.refresh(deeply)

    def _add_norm(self, hidden: Tensor, branch: Tensor | None, norm: Norm, post: Norm | None) -> tuple[Tensor, Tensor]:
        added, normed = self.kernels.add_norm(hidden, branch, norm, post)
        assert normed is not None
        return added, normed

    def _embedded(self, tokens: Tensor) -> Tensor:
        embedded, scale = F.embedding(tokens, self.weights.embedding), self.weights.embed_scale
        return embedded if scale == 1.0 else embedded * scale

    def attention(self, rows: StaticRows, depth: int, qkv: Tensor) -> Tensor:
        """The heads' results of a layer, `[N, heads * head_dim]`, from queries, keys and values side by side."""
        layer, given = self.weights.layers[depth], self.rotate_args(rows, depth, qkv)
        queries, (_, keys, values, layout, _) = self.kernels.rotate(*given), given
        return self.kernels.attend(queries, keys, values, layout, layer.scale, layer.window).flatten(1)

    def rotate_args(self, rows: StaticRows, depth: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Layout, Rotation]:
        """What `kernels.rotate` takes in a layer."""
        layer, dim = self.weights.layers[depth], self.weights.head_dim
        key = qkv.unflatten(1, (-1, dim))[:, : len(layer.k.weight) // dim]  # of the shape of new keys and values
        angles = self._rotary.of(rows.layout.most_tokens)[layer.layer_type]
        rotation = Rotation(*angles, layer.q_norm, layer.k_norm)
        return qkv, *rows.cache.layer(layer.layer_idx, key, key), rows.layout, rotation


class Products(NamedTuple):
    """The products of one layer."""

    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


def _groups(layer: Layer) -> tuple[tuple[Linear, ...], ...]:
    """The linear layers that are one product each, since they have the same input."""
    return (layer.q, layer.k, layer.v), (layer.o,), (layer.gate, layer.up), (layer.down,)


def tap(taps: Taps | None, depth: int, start: int, hidden: Tensor) -> None:
    if taps is not None and start < depth and depth in taps:
        taps[depth] = hidden


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
