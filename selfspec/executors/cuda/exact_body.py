"""`ExactBody`: fused layers whose results for a token depend, bit for bit, on it and the tokens before it alone.

Norms, rotations and activations are computed token by token in any case. Products run with numbers of rows that give a
row the same bits. Attention sums in an order that depends on positions alone: splits and tiles are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Size, Tensor

from selfspec.executors.cuda.fused_body import FusedBody
from selfspec.executors.cuda.packed_linear import PackedLinear
from selfspec.executors.cuda.rounds import StaticRows
from selfspec.kernels.layout import LEAST_TILE, SPLIT, padded
from selfspec.kernels.suite import Kernels
from selfspec.model.kv_cache import PackedRows
from selfspec.model.row_counts import MULTIPLES, RowCounts, fill_up, measured, random_rows
from selfspec.model.split_model import Taps

WIDE_SPLIT = 1024  # tokens of a split of attention in wide calls
WIDE_TILE = 64

Signature = tuple[tuple[Size, ...], bool]


def with_fixed_order(kernels: Kernels, is_wide: bool = False) -> Kernels:
    """The kernels, whose attention sums in a constant order. `is_wide`: calls have many new tokens of a row."""

    def attend(queries: Tensor, keys: Tensor, *given: Any) -> Tensor:
        share = queries.shape[1] // keys.shape[2]
        least = WIDE_TILE if is_wide and queries.element_size() < 4 else LEAST_TILE  # float32 is summed in registers
        tile_rows = max(least, 1 << (share - 1).bit_length())
        return kernels.attend(queries, keys, *given, tile_rows=tile_rows, split=WIDE_SPLIT if is_wide else SPLIT)

    return kernels._replace(attend=attend)


class ExactBody(FusedBody):
    """`FusedBody` with products of constant numbers of rows and attention in a constant order.

    Args:
        shares: the layers, with their packed weights.
        kernels: those of `with_fixed_order`.
        rows: the number of rows of a product.
        free: measure which other numbers of rows give the same bits, and use them.
    """

    def __init__(self, shares: FusedBody, kernels: Kernels, rows: int, free: bool) -> None:
        super().__init__(shares.weights, kernels, shares.packing, shares)
        constant = dict.fromkeys(map(_signature, self.linears), RowCounts(rows, rows))
        self._counts = self._measured(rows) if free else constant
        self._whole = RowCounts(rows, rows, all(counts.is_free for counts in self._counts.values()))

    @property
    def row_counts(self) -> Mapping[Signature, RowCounts]:
        """The numbers of rows of products, by the shapes of their weights and whether there are biases."""
        return self._counts

    def product(self, linear: PackedLinear, x: Tensor) -> Tensor:
        """See `FusedBody.product`."""
        return self._counts[_signature(linear)].apply(linear, x)

    def run(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None = None) -> Tensor:
        """See `SplitModel.run`. Places are filled up once for all layers, so that products need not do it."""
        assert isinstance(rows, StaticRows)
        count = rows.num_tokens
        filled = self._whole.filled(count)
        if filled == count:
            return super().run(rows, start, stop, given, taps)
        rows = StaticRows(rows.cache, padded(rows.layout, filled), self.kernels)
        hidden = super().run(rows, start, stop, fill_up(given, filled), taps)
        for depth, states in (taps or {}).items():
            if taps is not None and states is not None and start < depth <= stop:
                taps[depth] = states[:count]
        return hidden[:count]

    def _measured(self, rows: int) -> dict[Signature, RowCounts]:
        found = dict[Signature, RowCounts]()
        for linear in self.linears:
            if _signature(linear) not in found:
                x = random_rows(MULTIPLES * rows, linear.linears[0].weight)
                found[_signature(linear)] = measured(linear, x, rows)
        return found


def _signature(linear: PackedLinear) -> Signature:
    return tuple(one.weight.shape for one in linear.linears), any(one.bias is not None for one in linear.linears)
