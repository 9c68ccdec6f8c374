"""Attention in a fixed order: what a query gets depends on the query, its position and the keys before it alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.model.attention import Reach, limit_reach
from selfspec.model.kv_cache import PackedRows


class Tile(NamedTuple):
    """Queries of one row in the slots of their positions, `first` .. `first + size`; the other slots stay empty.

    Keys are read up to the tile's end, whether written yet or not, so that the shape of the call is that of the tile.
    """

    first: int  # a multiple of `size`
    size: int
    slot: int  # of the first query
    num: int  # queries, in neighbouring slots
    at: int  # the first query's place in the block
    keys: slice | Tensor  # where the row's written keys lie in the layer's storage, by position


def attend_exactly(
    rows: Any,  # `selfspec.model.exact.BlockRows`
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    reach: Reach,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Does what `attend_rows` does, tile by tile, in calls whose shapes depend on the tiles' positions alone."""
    heads, num_tokens, head_dim = queries.shape
    out = queries.new_zeros(num_tokens, heads, values.shape[-1])
    for tile in rows.tiles:
        low = _lowest(tile, reach)
        q = queries.new_zeros(1, heads, tile.size, head_dim)
        mine = slice(tile.slot, tile.slot + tile.num)
        q[0, :, mine] = queries[:, tile.at : tile.at + tile.num]
        k, v = _laid_out(keys, tile, low), _laid_out(values, tile, low)
        mask = _mask(rows, tile, low, reach, q)
        if softcap is None and sinks is None:
            result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        else:
            result = _spelt_out(q, k, v, mask, scale, softcap, sinks)
        out[tile.at : tile.at + tile.num] = result[0, :, mine].transpose(0, 1)
    return out


def _lowest(tile: Tile, reach: Reach) -> int:
    """The first key that any slot of the tile may look at, at a tile's border below it."""
    low = 0
    if reach.window is not None:
        low = max(low, tile.first - reach.window + 1)
    if reach.chunk is not None:
        low = max(low, tile.first // reach.chunk * reach.chunk)
    return low // tile.size * tile.size


def _laid_out(storage: Tensor, tile: Tile, low: int) -> Tensor:
    """`[1, kv_heads, keys, head_dim]` of keys [low, end of the tile) in memory of their own: zeros where none is yet.

    Pages, neighbours in memory and rejected drafts can then have no part in the result.
    """
    written = storage.flatten(0, 1)[tile.keys][low:]
    end = tile.first + tile.size - low
    laid = storage.new_zeros(storage.shape[2], end, storage.shape[3])
    laid[:, : len(written)] = written.transpose(0, 1)
    return laid[None]


def _mask(rows: PackedRows, tile: Tile, low: int, reach: Reach, like: Tensor) -> Tensor:
    """Additive mask `[size, keys]`: 0 where a slot may look, -inf elsewhere. The same for every row at this tile."""
    known = ("mask", tile.first, reach)
    mask: Tensor | None = rows.plans.get(known)
    if mask is None:
        at = torch.arange(tile.first, tile.first + tile.size, device=like.device)[:, None]
        keys = torch.arange(low, tile.first + tile.size, device=like.device)
        seen = limit_reach(keys <= at, at, keys, reach)
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))
        rows.plans[known] = mask
    return mask


def _spelt_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention step by step, for soft-capped scores (Gemma 2) and attention sinks (gpt-oss): `[1, heads, size, d]`."""
    heads, kv_heads, size = q.shape[1], k.shape[1], q.shape[2]
    grouped = q[0].reshape(kv_heads, heads // kv_heads * size, -1)
    scores = (grouped @ k[0].transpose(1, 2)).view(heads, size, -1) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + mask).float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, size, 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    grouped = weights.to(v.dtype).view(kv_heads, heads // kv_heads * size, -1)
    return (grouped @ v[0]).view(1, heads, size, -1)
