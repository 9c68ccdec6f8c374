"""Logits processors of the caller, asked at every packed position with that position's own prefix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.decoding.row import Row


def process_packed(rows: Sequence[Row], lengths: Sequence[int], fed: list[int], logits: Tensor) -> Tensor:
    """Apply each row's processors at every position, each with its own prefix: the content and the drafts before it.

    Args:
        lengths: drafted tokens per row.
        fed: every packed token, row after row: the row's last token, then its drafts.
        logits: `[N, vocab]`, at those tokens.
    """
    out, at = [], 0
    for row, drafted in zip(rows, lengths, strict=True):
        for j in range(drafted + 1):
            out.append(process(row, fed[at + 1 : at + 1 + j], logits[at + j]))
        at += drafted + 1
    return torch.stack(out)


def process(row: Row, drafted: Sequence[int], logits: Tensor) -> Tensor:
    """A row's processors on logits `[vocab]`, after its content and the `drafted` tokens."""
    if not row.request.logits_processor:
        return logits
    ids = torch.tensor([[*row.content, *drafted]], device=logits.device)
    scores = logits[None].clone()
    with row.blamed():
        for one in row.request.logits_processor:
            scores = one(ids, scores)
    return scores[0]
