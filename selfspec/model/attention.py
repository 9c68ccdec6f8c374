"""Attention of packed ragged rows over the paged cache: the `sdpa` backend, for every device.

It is registered with transformers under a name without a mask function, so the model builds no mask. A query attends to
its row's tokens up to itself, within the layer's sliding window or chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.model.kv_cache import PackedRows
from selfspec.model.row_groups import SHORT, Group, plan_groups

NAME = "selfspec"


class Reach(NamedTuple):
    """A layer's attention range: the last `window` tokens, or the tokens of the same chunk; None: no limit."""

    window: int | None
    chunk: int | None


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, N, head_dim]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: PackedRows | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for `transformers.AttentionInterface`: returns `[1, N, heads, head_dim]` and no weights."""
    if attention_mask is not None:
        raise ValueError("the model passes an attention mask, which packed rows do not support")
    rows: PackedRows = packed if packed is not None else key.packed  # type: ignore[attr-defined]
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    keys, values = rows.cache.layer(layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
    reach = Reach(sliding_window, chunk_size(module, layer_idx))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows.new = key[0], value[0]
    try:
        out = (rows.attend or attend_rows)(rows, query[0], keys, values, reach, scale, softcap, s_aux)
    finally:
        rows.new = None
    return out[None].contiguous(), None


def attend_rows(
    rows: PackedRows,
    queries: Tensor,  # [heads, N, head_dim]
    keys: Tensor,  # the layer's storage, [pages, page_size, kv_heads, head_dim], new tokens written
    values: Tensor,
    reach: Reach,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
) -> Tensor:  # [N, heads, head_dim]
    """Attention of every packed token over its row's content up to itself."""
    groups: list[Group] | None = rows.plans.get("groups")
    if groups is None:
        groups = rows.plans["groups"] = plan_groups(rows)
    out = None
    for number, group in enumerate(groups):
        taken = queries if group.gather is None else queries[:, group.gather]
        here = limiting(reach, group.limit)
        if group.is_long and here == (None, None) and softcap is None and sinks is None:
            result = _attend_long(rows, group, taken, keys, values, scale)
        else:
            k, v = _read(keys, group), _read(values, group)
            result = _attend_group(rows, number, group, here, taken, k, v, scale, softcap, sinks)
        if group.scatter is None:
            return result
        if out is None:
            out = result.new_empty(rows.num_tokens, *result.shape[1:])
        out[group.scatter[0]] = result[group.scatter[1]]
    assert out is not None
    return out


def _attend_long(
    rows: PackedRows, group: Group, queries: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:  # [n, heads, head_dim]
    """Causal attention of one row with many new tokens, `[heads, n, head_dim]`.

    There is no mask tensor, which torch's flash and cuDNN kernels refuse. The keys of a row without cached tokens are
    not read back from its pages.
    """
    from torch.nn.attention.bias import causal_lower_right  # it imports torch._dynamo, which takes a second

    n = queries.shape[1]
    if rows.new is not None and group.limit == n:
        k, v = ((one if group.gather is None else one[:, group.gather])[None] for one in rows.new)
    else:
        k, v = _read(keys, group), _read(values, group)
    mask: Any = None if group.limit == n else causal_lower_right(n, group.limit)
    gqa = len(queries) != k.shape[1]
    out = F.scaled_dot_product_attention(
        queries[None], k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    return out[0].transpose(0, 1)


def _attend_group(
    rows: PackedRows,
    number: int,
    group: Group,
    reach: Reach,
    queries: Tensor,  # [heads, R * n, head_dim]
    keys: Tensor,  # [R, kv_heads, limit, head_dim]
    values: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [R * n, heads, head_dim]
    heads, kv_heads = queries.shape[0], keys.shape[1]
    count, n = group.positions.shape
    plain = softcap is None and sinks is None
    # Few queries: heads that share a key head are folded into the query axis, so that keys are not repeated.
    share = heads // kv_heads if n <= SHORT or not plain else 1
    if group.single and reach == (None, None):
        mask = None
    else:
        known = (number, reach, queries.dtype, share)
        mask = rows.plans.get(known)
        if mask is None:
            mask = rows.plans[known] = _mask(group, reach, queries.dtype).repeat(1, 1, share, 1)
    q = (
        queries.view(heads // share, share, count, n, -1)
        .permute(2, 0, 1, 3, 4)
        .reshape(count, heads // share, share * n, -1)
    )
    if plain:
        gqa = q.shape[1] != kv_heads
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=gqa)
    else:
        out = _explicit(q, keys, values, mask, scale, softcap, sinks)
    out = out.view(count, heads // share, share, n, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(count * n, heads, -1)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention as explicit operations, for soft-capped scores (Gemma 2) and attention sinks (gpt-oss)."""
    scores = (q @ k.transpose(2, 3)) * scale  # [R, kv_heads, share * n, limit]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    scores = scores.float()
    if sinks is not None:
        share_n, kv_heads = q.shape[2], q.shape[1]
        column = sinks.float().view(kv_heads, -1).repeat_interleave(share_n // (sinks.numel() // kv_heads), 1)
        scores = torch.cat([scores, column[None, :, :, None].expand(scores.shape[0], -1, -1, 1)], -1)
    weights = scores.softmax(-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(v.dtype) @ v


def _mask(group: Group, reach: Reach, dtype: torch.dtype) -> Tensor:
    """Additive mask `[R, 1, n, limit]`: 0 for visible keys, -inf for others."""
    at = group.positions[:, None, :, None]
    keys = torch.arange(group.limit, device=at.device)
    seen = limit_reach(keys <= at, at, keys, reach)
    return torch.zeros(seen.shape, dtype=dtype, device=at.device).masked_fill_(~seen, float("-inf"))


def limiting(reach: Reach, length: int) -> Reach:
    """`reach`, without the limits that no query of a row of `length` tokens comes to."""
    return Reach(*(None if limit is not None and limit >= length else limit for limit in reach))


def limit_reach(seen: Tensor, at: Tensor, keys: Tensor, reach: Reach) -> Tensor:
    """`seen`, without the keys at positions that queries at `at` cannot reach; all three tensors broadcast."""
    if reach.window is not None:
        seen = seen & (at - keys < reach.window)
    if reach.chunk is not None:
        seen = seen & (keys // reach.chunk == at // reach.chunk)
    return seen


def _read(pages: Tensor, group: Group) -> Tensor:
    """Keys or values `[R, kv_heads, limit, head_dim]`: a view where the pages are a slice, else a copy."""
    part = pages[group.pages]
    part = part.reshape(len(group.positions), -1, *part.shape[-2:])
    return part[:, : group.limit].transpose(1, 2)


def chunk_size(module: torch.nn.Module, layer_idx: int) -> int | None:
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[layer_idx] == "chunked_attention":
        return int(config.attention_chunk_size)  # type: ignore[union-attr]
    return None
