"""Logits processors of the caller, asked at every packed position with that position's own prefix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.executors.rows import Row
from selfspec.model.kv_cache import Tree


def process_packed(
    rows: Sequence[Row],
    lengths: Sequence[int],
    fed: list[int],
    logits: Tensor,
    trees: Sequence[Tree | None] | None = None,
) -> Tensor:
    """Apply each row's processors at every position, each with its own prefix: the content and the drafts before it.

    Args:
        lengths: drafted tokens per row.
        fed: every packed token, row after row: the row's last token, then its drafts.
        logits: `[N, vocab]`, at those tokens.
        trees: per row, how its tokens go on from each other; None: one after the other.
    """
    out, at = [], 0
    for row, drafted, tree in zip(rows, lengths, trees or [None] * len(rows), strict=True):
        tokens = fed[at : at + drafted + 1]
        before: list[list[int]] = [[]]
        for j in range(1, drafted + 1):
            before.append([*before[j - 1 if tree is None else tree.parents[j]], tokens[j]])
        out += [process(row, before[j], logits[at + j]) for j in range(drafted + 1)]
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
