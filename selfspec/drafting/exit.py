"""Drafts by early exit: the first layers write, token by token, what the others will check (arXiv 2404.16710)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.target.cache import PackedRows, PagedCache, Span
from selfspec.target.stack import Stack


class DraftRow(NamedTuple):
    """Where a row stands when a round begins."""

    pages: Sequence[int]
    position: int  # of its last token, which has no keys and values yet
    length: int  # how many tokens to draft, at least 0


class Draft(NamedTuple):
    """Every token fed to the early layers this round, row after row: the row's last token, then what it drafted."""

    tokens: Tensor  # int64 [N]
    hidden: Tensor  # [N, hidden_size], after the exit layer
    lengths: list[int]  # drafted tokens per row; N = sum of (length + 1)


# (hidden states [R, hidden_size], their rows, draft step) -> (picks [R], rows that go on)
Chooser = Callable[[Tensor, list[int], int], tuple[Tensor, list[int]]]


def draft_by_exit(
    stack: Stack,
    cache: PagedCache,
    rows: Sequence[DraftRow],
    tokens: Tensor,  # int64 [len(rows)]: each row's last token
    exit_layer: int,
    choose: Chooser,
) -> Draft:
    """Draft each row's tokens in lock step; rows leave as their lengths end.

    A row's last drafted token runs through the early layers too: verification can then carry on from the exit for every
    token, and a full acceptance yields its bonus token.
    """
    steps: list[tuple[list[int], Tensor, Tensor]] = []  # rows fed, their tokens, their hidden states
    live, lengths = list(range(len(rows))), [row.length for row in rows]
    while live:
        step = len(steps)
        packed = PackedRows(cache, [Span(rows[r].pages, rows[r].position + step, 1) for r in live], stack.device)
        hidden = stack.run(packed, 0, exit_layer, tokens)
        steps.append((live, tokens, hidden))
        going = [r for r in live if lengths[r] > step]
        if not going:
            break
        if len(going) < len(live):
            hidden = hidden[[live.index(r) for r in going]]
        tokens, kept = choose(hidden, going, step)
        for r in set(going).difference(kept):
            lengths[r] = step + 1  # a row that stops still feeds the token it has just drafted, in the next step
        live = going
    return _row_major(steps, len(rows))


def _row_major(steps: list[tuple[list[int], Tensor, Tensor]], num_rows: int) -> Draft:
    tokens = torch.cat([fed for _, fed, _ in steps])
    hidden = torch.cat([states for _, _, states in steps])
    lengths = [-1] * num_rows
    slots: list[list[int]] = [[] for _ in range(num_rows)]
    at = 0
    for fed, _, _ in steps:
        for row in fed:
            lengths[row] += 1
            slots[row].append(at)
            at += 1
    if num_rows > 1:
        index = torch.tensor([slot for row in slots for slot in row], device=tokens.device)
        tokens, hidden = tokens[index], hidden[index]
    return Draft(tokens, hidden, lengths)
