"""Exact mode: every number a token gets depends on that token and those before it, down to the last bit.

A matrix product over one row and one over five may round differently, and so may attention over keys that are padded
to another length. Here every call has one constant shape. Tokens run in blocks of `rows`, idle ones filling the last
block; a query stands in the slot of its position in a tile of `rows` positions, and its tile's place alone says which
keys its attention reads. The tokens of a prompt that fill whole tiles of `wide` positions run in blocks of `wide`. So
a token's hidden states, keys, values and logits are the same bits whichever tokens run beside it, in any batch, order
of arrival, draft length and exit layer: speculation equals plain decoding in bfloat16 as in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec.errors import UnsupportedModelError
from selfspec.model.attention_backends import Backend
from selfspec.model.exact_attention import Tile, attend_exactly
from selfspec.model.exact_check import difference
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.kv_cache import PackedRows, Span
from selfspec.model.self_check import check_part_heads
from selfspec.model.stack import Stack, Taps

ROWS, CPU_ROWS = 64, 8  # on a CPU, idle tokens are not free
WIDE = 128


class ExactStack(Stack):
    """A stack over the same weights as another, whose results do not depend on what else a call holds.

    It costs what idle tokens cost: little where a call's time goes into reading weights.

    Args:
        source: the stack it stands beside; its exit heads are this one's, as they are at the time of a call.
        rows: tokens of a block, and positions of a tile; default: `CPU_ROWS` on CPU, else `ROWS`.
        wide: the same where a prompt is read.

    Raises:
        UnsupportedModelError: the model's experts cannot be run in constant shapes, or results differ all the same.
    """

    def __init__(self, source: Stack, rows: int | None = None, wide: int = WIDE) -> None:
        self._source, self.wide = source, wide
        self.rows = rows or (CPU_ROWS if source.device.type == "cpu" else ROWS)
        super().__init__(source.model, "sdpa")
        self.backend = Backend("exact", attend_exactly)
        _settle_experts(self._twin)
        check_part_heads(self)
        differs = difference(self)
        if differs:
            kind = getattr(self.config, "model_type", "model")
            raise UnsupportedModelError(
                f"{kind}: in exact mode its {differs} still depend on what else a call holds, on this device; "
                "decode without exact"
            )

    @property
    def exit_heads(self) -> ExitHeads | None:
        """Those of the source: drafts need not be exact, only what judges them."""
        return self._source.exit_heads

    @exit_heads.setter
    def exit_heads(self, heads: ExitHeads | None) -> None:
        assert heads is None or heads is self._source.exit_heads, "exit heads are set on the target's own stack"

    def run(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None = None) -> Tensor:
        """See `Stack.run`; the same in blocks, of which later ones find the keys of earlier ones in the cache."""
        out: Tensor | None = None
        inner = [depth for depth in taps or {} if start < depth <= stop]
        for block in blocks_of(rows, self.rows, self.wide):
            filled = given.new_zeros(block.width, *given.shape[1:])
            filled[: len(block.index)] = given[block.index]
            seen: Taps | None = dict.fromkeys(inner) if inner else None
            hidden = super().run(block.rows, start, stop, filled, seen)
            if out is None:
                out = hidden.new_empty(rows.num_tokens, hidden.shape[-1])
                if taps is not None:
                    taps.update({depth: torch.empty_like(out) for depth in inner})
            out[block.index] = hidden[: len(block.index)]
            for depth, states in (seen or {}).items():
                assert taps is not None and states is not None
                taps[depth][block.index] = states[: len(block.index)]  # type: ignore[index]
        assert out is not None
        return out

    def head_logits(self, hidden: Tensor, lacks_norm: bool) -> Tensor:
        """See `Stack.head_logits`; an early exit's need not be exact."""
        if lacks_norm:
            return super().head_logits(hidden, True)
        out = []
        for block in hidden.split(self.rows):
            filled = hidden.new_zeros(self.rows, hidden.shape[-1])
            filled[: len(block)] = block
            out.append(super().head_logits(filled, False)[: len(block)])
        return torch.cat(out)


# ------------------------------------------------------------------------------------------------------------- blocks


@dataclass(slots=True)
class Block:
    """Tokens of a packed call that run together, idle ones behind them."""

    rows: BlockRows
    index: Tensor  # int64: where the real ones stand in the packed call
    width: int


class BlockRows(PackedRows):
    """A packed call of constant width: idle tokens stand at position 0, write no keys and are nobody's neighbours."""

    def __init__(self, source: PackedRows, spans: Sequence[Span], width: int) -> None:
        super().__init__(source.cache, spans, source.device)
        self.num_real = self.positions.shape[1]
        idle = self.positions.new_zeros(1, width - self.num_real)
        self.positions = torch.cat([self.positions, idle], 1)
        self.tiles = tiles_of(self, width)

    def write(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return super().write(layer_idx, key[: self.num_real], value[: self.num_real])


def blocks_of(rows: PackedRows, narrow: int, wide: int) -> list[Block]:
    """The blocks of a packed call, in an order in which a row's earlier tokens come first."""
    known: list[Block] | None = rows.plans.get("blocks")
    if known is None:
        prompts: Sequence[int] = rows.plans.get("prompts") or [0] * len(rows.spans)  # where they are being read
        first, rest, at = [], [], 0
        for span, num_prompt in zip(rows.spans, prompts, strict=True):
            # A matter of position alone, not of how a prompt is cut into calls: those that fill whole wide tiles.
            if span.tree is not None:
                rest += [(node, at + i) for i, node in enumerate(span.nodes())]
                at += span.length
                continue
            n = min(span.length, max(0, num_prompt // wide * wide - span.start))
            if n:
                first.append((Span(span.pages, span.start, n), at))
            if n < span.length:
                rest.append((Span(span.pages, span.start + n, span.length - n), at + n))
            at += span.length
        known = rows.plans["blocks"] = [*_cut(rows, first, wide), *_cut(rows, rest, narrow)]
    return known


def _cut(rows: PackedRows, spans: Sequence[tuple[Span, int]], width: int) -> list[Block]:
    """Pack spans (each with its first token's place in the call) into blocks, in order."""
    blocks: list[Block] = []
    taken: list[Span] = []
    index: list[int] = []

    def close() -> None:
        place = torch.tensor(index, device=rows.device)
        blocks.append(Block(BlockRows(rows, taken, width), place, width))

    for span, at in spans:
        done = 0
        while done < span.length:
            count = min(span.length - done, width - len(index))
            taken.append(span if span.tree is not None else Span(span.pages, span.start + done, count))
            index += range(at + done, at + done + count)
            done += count
            if len(index) == width:
                close()
                taken, index = [], []
    if index:
        close()
    return blocks


def tiles_of(rows: BlockRows, size: int) -> list[Tile]:
    """The tiles that a block's queries stand in: each row's, cut where its positions cross a multiple of `size`."""
    tiles, at = [], 0
    for span in rows.spans:
        start = span.positions()[0]
        stop = start + span.length
        while start < stop:
            first = start // size * size
            last = min(stop, first + size)
            tiles.append(Tile(first, size, start - first, last - start, at, _written(rows, span, last)))
            at += last - start
            start = last
    return tiles


def _written(rows: PackedRows, span: Span, stop: int) -> slice | Tensor:
    """Where the keys [0, stop) of a row lie in a layer's storage."""
    size = rows.cache.page_size
    if span.tree is not None:
        at = torch.tensor([*range(span.root), *span.branch()], device=rows.device)
        return torch.tensor(span.pages, device=rows.device)[at // size] * size + at % size
    if len(span.pages) == 1:
        return slice(span.pages[0] * size, span.pages[0] * size + stop)
    pages = torch.tensor(span.pages[: rows.cache.pages_for(stop)], device=rows.device)
    return (pages[:, None] * size + torch.arange(size, device=rows.device)).flatten()[:stop]


def _settle_experts(twin: Any) -> None:
    """Experts, if there are any, one product per token: grouped by expert, the rows of a product would vary."""
    if not any("Experts" in type(module).__name__ for module in twin.modules()):
        return
    kind = getattr(twin.config, "model_type", "model")
    try:
        twin.set_experts_implementation("batched_mm")
    except (AttributeError, ValueError, KeyError) as problem:
        raise UnsupportedModelError(
            f"{kind}: its experts are given as many tokens as choose them, so that rounding depends on a token's "
            "neighbours, and exact mode cannot be had; decode without exact"
        ) from problem
