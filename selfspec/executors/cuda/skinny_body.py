"""`SkinnyBody`: the layers of a Llama-shaped model in five launches each, for calls of few tokens.

A layer is: norm and product for queries, keys and values; rotation, KV write and attention; output product and sum;
norm, products for gate and up, and activation; down product and sum. Products have one order of sums for up to 64 rows,
and attention splits of a constant size: so a token's bits do not depend on the other tokens of the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.executors.cuda.fused_body import FusedBody, tap
from selfspec.executors.cuda.packed_linear import PackedLinear
from selfspec.executors.cuda.rounds import StaticRows
from selfspec.kernels.checks import SKINNY_ROWS
from selfspec.kernels.layout import SPLIT, Layout
from selfspec.model.attention_backends import layout_of
from selfspec.model.kv_cache import PackedRows, PagedCache, Span
from selfspec.model.llama_weights import Layer
from selfspec.model.split_model import Taps

MOST_PARTIAL_BYTES = 128 << 20  # of partial results of attention
COMPARED = (1, 2, 5, 16, 17, 33)  # rows of calls whose bits are compared with those of 64
NUM_NEW = 5  # tokens of a row in one call, compared with as many calls


class SkinnyBody(FusedBody):
    """Fused layers in five launches each for calls of at most `most_rows` places; longer calls take ten.

    Args:
        shares: the layers, with their packed weights; `unserved` says whether they can be run so.
        most_rows: 1 to 64.
    """

    def __init__(self, shares: FusedBody, most_rows: int = SKINNY_ROWS) -> None:
        super().__init__(shares.weights, shares.kernels, shares.packing, shares)
        self.most_rows = most_rows
        kv_heads = len(self.weights.layers[0].k.weight) // self.weights.head_dim
        device = self.weights.embedding.device
        self._counters = torch.zeros(SKINNY_ROWS * kv_heads, dtype=torch.int32, device=device)

    def __str__(self) -> str:
        return f"fused, five launches for up to {self.most_rows} tokens"

    def run(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None = None) -> Tensor:
        """See `SplitModel.run`."""
        assert isinstance(rows, StaticRows)
        if not self.takes(rows.layout):
            return super().run(rows, start, stop, given, taps)
        hidden = given if start else self._embedded(given)
        squares = self.kernels.squares_of(hidden)
        for depth in range(start, stop):
            tap(taps, depth, start, hidden)
            attended = self.rotate_attend(rows, depth, self.qkv(depth, hidden, squares))
            hidden, squares = self.add(self.products[depth].o, attended, hidden)
            hidden, squares = self.add(self.products[depth].down, self.gated(depth, hidden, squares), hidden)
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


@torch.inference_mode()
def differing_rows(split: Any, body: SkinnyBody) -> str:
    """Which calls give a row other bits than a call of 64 rows, or several tokens others than one by one; "": none.

    Rows hold about `SPLIT` tokens, so that some calls have one split of attention and others combine two. They share
    the pages of all but the last tokens.
    """
    page, begin = 8, SPLIT - NUM_NEW // 2  # the tokens that are fed; those before are random
    shared, own = range(begin // page), -(-(begin % page + NUM_NEW) // page)
    cache = PagedCache(len(shared) + SKINNY_ROWS * own, page)
    shape, rng = (SKINNY_ROWS, NUM_NEW), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, split.vocab_size, shape, generator=rng).to(split.device)

    def run(rows: int, at: int, count: int = 1) -> Tensor:
        pages = [range(first, first + own) for first in range(len(shared), cache.num_pages, own)]
        spans = [Span([*shared, *pages[row]], begin + at, count) for row in range(rows)]
        static = StaticRows(cache, layout_of(PackedRows(cache, spans, split.device)), body.kernels)
        return body.run(static, 0, split.num_layers, tokens[:rows, at : at + count].flatten())

    run(1, 0)  # allocates the pages
    fill_randomly(cache)
    for at in range(NUM_NEW):
        whole = run(SKINNY_ROWS, at)
        for rows in COMPARED if at in (0, NUM_NEW - 1) else ():
            if not torch.equal(run(rows, at), whole[:rows]):
                return f"a row has other bits among {rows} rows than among {SKINNY_ROWS}"
    rows = SKINNY_ROWS // NUM_NEW
    alone = [run(rows, at) for at in range(NUM_NEW)]
    fill_randomly(cache)  # the same numbers, without the keys and values of the tokens
    if not torch.equal(torch.stack(alone, 1).flatten(0, 1), run(rows, 0, NUM_NEW)):
        return f"{NUM_NEW} tokens of a row have other bits than one by one"
    return ""


def fill_randomly(cache: PagedCache) -> None:
    """Fill the storage of every layer that has written with random keys and values, the same ones every time."""
    for pair in cache.storages:
        for one in pair:
            one.normal_(generator=torch.Generator(one.device).manual_seed(0))
