"""Causal attention in blocks of queries: equal to sdpa, and faster in training on CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

BLOCKS = 4


def blocked_causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend from each of four blocks of queries to the keys up to the block's end; no padding, no cache.

    query `[B, H, T, D]`, key and value `[B, KV, T, D]`; returns `[B, T, H, D]`. In bfloat16, oneDNN's batched products
    are several times as fast as training with the fused CPU kernel. Most scores above the diagonal are not computed.
    """
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    group, block = heads // kv_heads, max(1, -(-length // BLOCKS))
    query = (query * scaling).view(batch, kv_heads, group, length, width)
    key, value = (x.reshape(batch * kv_heads, length, width) for x in (key, value))
    above = torch.full((block, block), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        rows = stop - start
        some = query[:, :, :, start:stop].reshape(batch * kv_heads, group * rows, width)
        scores = torch.bmm(some, key[:, :stop].transpose(1, 2)).view(batch * kv_heads, group, rows, stop)
        scores = torch.cat((scores[..., :start], scores[..., start:] + above[:rows, :rows]), dim=-1)
        probs = scores.float().softmax(-1).to(value.dtype).view(batch * kv_heads, group * rows, stop)
        outputs.append(torch.bmm(probs, value[:, :stop]).view(batch, kv_heads, group, rows, width))
    return torch.cat(outputs, dim=3).view(batch, heads, length, width).transpose(1, 2).contiguous(), None


def register() -> str:
    """Register the function with transformers and return its name."""
    AttentionInterface.register("train_blocked_causal", blocked_causal_attention)
    return "train_blocked_causal"
