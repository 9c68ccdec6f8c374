"""Attention whose result for a query depends, bit for bit, only on the query, its position and the keys before it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.model.attention import Reach, limit_reach
from selfspec.model.kv_cache import PackedRows


class Tile(NamedTuple):
    """Queries of one row within the positions `first` .. `first + size`, one slot each; the other slots are zero.

    Keys are read up to the tile's end, written or not, so that shapes depend on the tile only.
    """

    first: int  # a multiple of `size`
    size: int
    slot: int  # slot of the first query
    num: int  # number of queries, in consecutive slots
    at: int  # index of the first query in the block
    keys: slice | Tensor  # slots of the row's written keys in the layer's storage, by position


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
        k, v = _contiguous(keys, tile, low), _contiguous(values, tile, low)
        mask = _mask(rows, tile, low, reach, q)
        if softcap is None and sinks is None:
            result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        else:
            result = _explicit(q, k, v, mask, scale, softcap, sinks)
        out[tile.at : tile.at + tile.num] = result[0, :, mine].transpose(0, 1)
    return out


def _lowest(tile: Tile, reach: Reach) -> int:
    """The first key that is visible from any slot of the tile, rounded down to a multiple of the tile's size."""
    low = 0
    if reach.window is not None:
        low = max(low, tile.first - reach.window + 1)
    if reach.chunk is not None:
        low = max(low, tile.first // reach.chunk * reach.chunk)
    return low // tile.size * tile.size


def _contiguous(storage: Tensor, tile: Tile, low: int) -> Tensor:
    """Copy of the keys [low, end of the tile), `[1, kv_heads, keys, head_dim]`, with zeros for unwritten ones.

    So pages, other rows and rejected drafts cannot affect the result.
    """
    written = storage.flatten(0, 1)[tile.keys][low:]
    end = tile.first + tile.size - low
    laid = storage.new_zeros(storage.shape[2], end, storage.shape[3])
    laid[:, : len(written)] = written.transpose(0, 1)
    return laid[None]


def _mask(rows: PackedRows, tile: Tile, low: int, reach: Reach, like: Tensor) -> Tensor:
    """Additive mask `[size, keys]`: 0 for visible keys, -inf for others. It is the same for every row at this tile."""
    known = ("mask", tile.first, reach)
    mask: Tensor | None = rows.plans.get(known)
    if mask is None:
        at = torch.arange(tile.first, tile.first + tile.size, device=like.device)[:, None]
        keys = torch.arange(low, tile.first + tile.size, device=like.device)
        seen = limit_reach(keys <= at, at, keys, reach)
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))
        rows.plans[known] = mask
    return mask


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention as explicit operations, for soft-caps (Gemma 2) and sinks (gpt-oss): `[1, heads, size, head_dim]`."""
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
