"""Exact mode: the results for a token depend, bit for bit, only on that token and the tokens before it.

Rounding may depend on the shape of a matrix product or an attention call. In exact mode these shapes are constant.
Tokens run in blocks of `rows`, and the last block is filled up with idle tokens. Attention runs in tiles of `rows`
positions, and the tile's position determines the keys that are read. Tokens of a prompt that fill whole tiles of `wide`
positions run in blocks of `wide`. So hidden states, keys, values and logits of a token are the same bits in any batch,
order of arrival, draft length and exit layer, and speculation equals plain decoding also in bfloat16.

On CUDA, `selfspec.executors.cuda.exact_runner` does the same from recordings: only products run in constant shapes,
where their rounding depends on shapes, and attention sums over fixed parts of a row.

Keys and values at a position are a function of the tokens up to there, and of which of these positions are among the
first `num_wide` tokens of the prompt. So two rows may share a page if their tokens are equal up to its end, and the
same of these positions are among those first ones in both rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from selfspec.model.row_counts import RowCounts
from selfspec.model.self_check import check_part_heads
from selfspec.model.stack import Stack, Taps

ROWS, CPU_ROWS = 64, 8  # on CPU, idle tokens take time
WIDE = 128


class ExactStack(Stack):
    """A stack with the weights of another one, whose results for a token do not depend on the other tokens of a call.

    Idle tokens take extra time: little where a call's time is spent on reading weights.

    Args:
        source: the other stack. Its exit heads are used, as they are at the time of a call.
        rows: tokens of a block and positions of a tile; default: `CPU_ROWS` on CPU, else `ROWS`.
        wide: the same for prompts.
        install: may set `runner` and `recorded`, which then run all calls, after a check of their results.

    Raises:
        UnsupportedModelError: experts cannot run in constant shapes, or results differ nevertheless.
    """

    def __init__(
        self,
        source: Stack,
        rows: int | None = None,
        wide: int = WIDE,
        install: Callable[[ExactStack, Stack], None] | None = None,
    ) -> None:
        self._source, self.wide = source, wide
        self.rows = rows or (CPU_ROWS if source.device.type == "cpu" else ROWS)
        self.head_counts = RowCounts(self.rows, self.rows)
        """The numbers of rows with which the head runs."""
        super().__init__(source.model, "sdpa")
        self.backend = Backend("exact", attend_exactly)
        _set_experts(self._twin)
        check_part_heads(self)
        if install is not None:
            install(self, source)
        differs = difference(self) if self.runner is None else ""
        if differs:
            kind = getattr(self.config, "model_type", "model")
            raise UnsupportedModelError(
                f"{kind}: in exact mode its {differs} still depend on the other tokens of a call, on this device; "
                "decode without exact"
            )

    def remove_runner(self) -> None:
        """Run all calls in blocks of constant width again."""
        self.runner = self.recorded = None
        self.head_counts = RowCounts(self.rows, self.rows)

    @property
    def exit_heads(self) -> ExitHeads | None:
        """The source's exit heads. They only affect drafts, which need not be exact."""
        return self._source.exit_heads

    @exit_heads.setter
    def exit_heads(self, heads: ExitHeads | None) -> None:
        assert heads is None or heads is self._source.exit_heads, "exit heads are set on the target's own stack"

    def run_here(self, rows: PackedRows, start: int, stop: int, given: Tensor, taps: Taps | None = None) -> Tensor:
        """See `Stack.run_here`; runs block by block, so that later blocks read the keys of earlier ones."""
        if rows.is_static:  # what runs then sees to constant shapes itself
            return super().run_here(rows, start, stop, given, taps)
        out: Tensor | None = None
        inner = [depth for depth in taps or {} if start < depth <= stop]
        for block in blocks_of(rows, self.rows, self.wide):
            filled = given.new_zeros(block.width, *given.shape[1:])
            filled[: len(block.index)] = given[block.index]
            seen: Taps | None = dict.fromkeys(inner) if inner else None
            hidden = super().run_here(block.rows, start, stop, filled, seen)
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

    def num_wide(self, num_tokens: int) -> int:
        """See `Stack.num_wide`: those that fill whole tiles of `wide` positions."""
        return num_tokens // self.wide * self.wide

    def head_logits(self, hidden: Tensor, lacks_norm: bool) -> Tensor:
        """See `Stack.head_logits`; logits of early exits need not be exact."""
        return super().head_logits(hidden, True) if lacks_norm else self.head_counts.apply(self.normed_logits, hidden)

    def normed_logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states after the final norm, by one product."""
        return super().head_logits(hidden, False)


# ------------------------------------------------------------------------------------------------------------- blocks


Placed = tuple[Span, int]  # new tokens of a row, and the index of the first one in the packed call


@dataclass(slots=True)
class Block:
    """Tokens of a packed call that run together, followed by idle tokens."""

    rows: BlockRows
    index: Tensor  # int64: indices of the real tokens in the packed call
    width: int  # number of tokens with the idle ones


class BlockRows(PackedRows):
    """A packed call of constant width. Idle tokens have position 0, write no keys and are in no tile."""

    def __init__(self, source: PackedRows, spans: Sequence[Span], width: int) -> None:
        super().__init__(source.cache, spans, source.device)
        self.num_real = self.positions.shape[1]
        idle = self.positions.new_zeros(1, width - self.num_real)
        self.positions = torch.cat([self.positions, idle], 1)
        self.tiles = tiles_of(self, width)

    def write(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return super().write(layer_idx, key[: self.num_real], value[: self.num_real])


def blocks_of(rows: PackedRows, narrow: int, wide: int) -> list[Block]:
    """The blocks of a packed call, ordered so that a row's earlier tokens run first."""
    known: list[Block] | None = rows.plans.get("blocks")
    if known is None:
        known = rows.plans["blocks"] = [
            Block(BlockRows(rows, spans, width), torch.tensor(index, device=rows.device), width)
            for width, part in zip((wide, narrow), parts_of(rows, wide), strict=True)
            for spans, index in cut(part, width)
        ]
    return known


def parts_of(rows: PackedRows, wide: int) -> tuple[list[Placed], list[Placed]]:
    """The tokens that run in blocks of `wide`, and the others, in order; trees are split into their tokens.

    Which tokens run in wide blocks depends on their positions only, not on the chunks of the prefill.
    """
    prompts: Sequence[int] = rows.plans.get("prompts") or [0] * len(rows.spans)  # prompt lengths, in prefill
    first, rest, at = list[Placed](), list[Placed](), 0
    for span, num_prompt in zip(rows.spans, prompts, strict=True):
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
    return first, rest


def cut(part: Sequence[Placed], width: int) -> Iterator[tuple[list[Span], list[int]]]:
    """Pack spans into groups of `width` tokens, in order; the last one may have fewer.

    Yields the spans of a group, and the indices of its tokens in the call.
    """
    taken, index = list[Span](), list[int]()
    for span, at in part:
        done = 0
        while done < span.length:
            count = min(span.length - done, width - len(index))
            taken.append(span if span.tree is not None else Span(span.pages, span.start + done, count))
            index += range(at + done, at + done + count)
            done += count
            if len(index) == width:
                yield taken, index
                taken, index = [], []
    if index:
        yield taken, index


def tiles_of(rows: BlockRows, size: int) -> list[Tile]:
    """The tiles of a block: each row's tokens, cut at positions that are multiples of `size`."""
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
    """The slots of a row's keys [0, stop) in a layer's storage."""
    size = rows.cache.page_size
    if span.tree is not None:
        at = torch.tensor([*range(span.root), *span.branch()], device=rows.device)
        return torch.tensor(span.pages, device=rows.device)[at // size] * size + at % size
    if len(span.pages) == 1:
        return slice(span.pages[0] * size, span.pages[0] * size + stop)
    pages = torch.tensor(span.pages[: rows.cache.pages_for(stop)], device=rows.device)
    return (pages[:, None] * size + torch.arange(size, device=rows.device)).flatten()[:stop]


def _set_experts(twin: Any) -> None:
    """Make experts compute one product per token. Grouped by expert, the shape of a product would vary."""
    if not any("Experts" in type(module).__name__ for module in twin.modules()):
        return
    kind = getattr(twin.config, "model_type", "model")
    try:
        twin.set_experts_implementation("batched_mm")
    except (AttributeError, ValueError, KeyError) as problem:
        raise UnsupportedModelError(
            f"{kind}: its experts run over as many tokens as are routed to them, so that rounding depends on the "
            "other tokens of a call; decode without exact"
        ) from problem
