"""`FusedBody`: the layers of a Llama-shaped model in ten launches each, for recordings.

A layer is: addition and norm, product for queries, keys and values, rotation and KV write, attention and its
combination, output product, addition and norm, product for gate and up, activation, down product. The model's own
modules take about 33 launches. Rounding is that of these modules, operation by operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.executors.cuda.packed_linear import PackedLinear, Packing
from selfspec.executors.cuda.rounds import StaticRows
from selfspec.kernels.layout import Norm
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
        self._products: list[_Products]
        self._rotary: RotaryTables
        if shares is not None:
            self._products, self._rotary = shares._products, shares._rotary
            return
        self._products = [_Products(layer, packing) for layer in weights.layers]
        types = [layer.layer_type for layer in weights.layers]
        self._rotary = RotaryTables(weights.rotary, types, weights.embedding)

    def __str__(self) -> str:
        return "fused"

    @staticmethod
    def bytes_of(weights: LlamaWeights) -> int:
        """Bytes that packed copies of a model's weights take."""
        return sum(PackedLinear.bytes_of(one) for layer in weights.layers for one in _groups(layer))

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory in addition to the model's own: packed copies and rotary tables."""
        return self._rotary.num_bytes + sum(one.num_bytes for one in self.linears)

    @property
    def linears(self) -> Iterator[PackedLinear]:
        """The products of all layers."""
        return (one for own in self._products for one in own.all())

    @property
    def by_name(self) -> dict[str, list[PackedLinear]]:
        """The products of all layers by their place in a layer: "qkv", "o", "gate_up", "down"."""
        return {name: [getattr(one, name) for one in self._products] for name in ("qkv", "o", "gate_up", "down")}

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
        tables = self._rotary.of(rows.layout.most_tokens)
        # The output of the last sublayer, and the norm that it still lacks. The next kernel adds it to `hidden`.
        branch: Tensor | None = None
        post: Norm | None = None
        for depth in range(start, stop):
            layer, products = layers[depth], self._products[depth]
            hidden, normed = self._add_norm(hidden, branch, layer.norm, post)
            tap(taps, depth, start, hidden)
            branch = self._attention(rows, layer, products, tables, normed)
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

    def _attention(self, rows: StaticRows, layer: Layer, products: _Products, tables: Tables, normed: Tensor) -> Tensor:
        """The attention's output `[N, hidden_size]`, before any norm of it."""
        layout, dim = rows.layout, self.weights.head_dim
        qkv = self.product(products.qkv, normed)
        key = qkv.unflatten(1, (-1, dim))[:, : len(layer.k.weight) // dim]  # of the shape of new keys and values
        keys, values = rows.cache.layer(layer.layer_idx, key, key)
        angles = tables[layer.layer_type]
        queries = self.kernels.rotate(
            qkv, keys, values, layout.slots, layout.positions, *angles, layer.q_norm, layer.k_norm
        )
        out = self.kernels.attend(queries, keys, values, layout, layer.scale, layer.window)
        return self.product(products.o, out.flatten(1))


class _Products:
    """The products of one layer."""

    def __init__(self, layer: Layer, packing: Packing) -> None:
        self.qkv, self.o, self.gate_up, self.down = (PackedLinear(one, packing) for one in _groups(layer))

    def all(self) -> Iterator[PackedLinear]:
        yield from (self.qkv, self.o, self.gate_up, self.down)


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
