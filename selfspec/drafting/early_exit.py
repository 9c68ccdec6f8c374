"""Drafts by early exit: the first layers draft token by token (arXiv 2404.16710)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.model.kv_cache import PackedRows, PagedCache, Span, tensor_of
from selfspec.model.split_model import SplitModel, Taps


class DraftRow(NamedTuple):
    """A row at the beginning of a round."""

    pages: Sequence[int]
    position: int  # position of its last token, which has no keys and values yet
    length: int  # number of tokens to draft, at least 0


class PackedDraft(NamedTuple):
    """The tokens that ran through the early layers in a round, row after row: the last token, then the draft."""

    tokens: Tensor  # int64 [N]
    hidden: Tensor  # [N, hidden_size], after the exit layer
    lengths: list[int]  # drafted tokens per row; N = sum of (length + 1)
    taps: Tensor | None = None  # [K, N, hidden_size] after the K tapped layers below the exit, in their order

    @classmethod
    def given(cls, last: Sequence[int], drafts: Sequence[Sequence[int]], device: torch.device) -> PackedDraft:
        """Given tokens after each row's last token, which no layer has read."""
        tokens = tensor_of([one for token, own in zip(last, drafts, strict=True) for one in (token, *own)], device)
        return cls(tokens, tokens, [len(own) for own in drafts])

    @property
    def is_unread(self) -> bool:
        """Whether no layer ran over the tokens; `hidden` are then the tokens, and all layers verify."""
        return self.hidden is self.tokens


# (hidden states [R, hidden_size], their rows, draft step) -> (picks [R], rows that continue, rows that withdraw theirs)
PickDraft = Callable[[Tensor, list[int], int], tuple[Tensor, list[int], list[int]]]


def draft_by_exit(
    split: SplitModel,
    cache: PagedCache,
    rows: Sequence[DraftRow],
    tokens: Tensor,  # int64 [len(rows)]: each row's last token
    exit_layer: int,
    choose: PickDraft,
    tapped: Sequence[int] = (),
) -> PackedDraft:
    """Draft the tokens of all rows step by step; a row leaves when it has drafted its length.

    A row's last drafted token runs through the early layers, too, so that verification continues from the exit layer
    for all tokens, and full acceptance yields the bonus token.

    Args:
        tapped: layers below the exit layer whose hidden states are kept.
    """
    steps: list[_Step] = []
    inner = [layer for layer in tapped if layer < exit_layer]
    live, lengths = list(range(len(rows))), [row.length for row in rows]
    while live:
        step = len(steps)
        packed = PackedRows(cache, [Span(rows[r].pages, rows[r].position + step, 1) for r in live], split.device)
        taps: Taps | None = dict.fromkeys(inner) if inner else None
        hidden = split.run(packed, 0, exit_layer, tokens, taps)
        seen = torch.stack([h for h in taps.values() if h is not None]) if taps else None
        steps.append(_Step(live, tokens, hidden, seen))
        going = [r for r in live if lengths[r] > step]
        if not going:
            break
        if len(going) < len(live):
            hidden = hidden[tensor_of([live.index(r) for r in going], hidden.device)]
        tokens, kept, withdrawn = choose(hidden, going, step)
        for r in set(going).difference(kept):
            lengths[r] = step + 1  # the token just drafted still runs through the early layers, in the next step
        live = going
        if withdrawn:
            live = [r for r in going if r not in withdrawn]
            tokens = tokens[tensor_of([going.index(r) for r in live], tokens.device)]
            lengths = [step if r in withdrawn else length for r, length in enumerate(lengths)]
    return _row_major(steps, len(rows))


class _Step(NamedTuple):
    rows: list[int]  # row of each token
    tokens: Tensor
    hidden: Tensor
    taps: Tensor | None  # [K, rows, hidden_size]


def _row_major(steps: list[_Step], num_rows: int) -> PackedDraft:
    lengths = [-1] * num_rows
    slots: list[list[int]] = [[] for _ in range(num_rows)]
    at = 0
    for step in steps:
        for row in step.rows:
            lengths[row] += 1
            slots[row].append(at)
            at += 1
    tokens = torch.cat([step.tokens for step in steps])
    hidden = torch.cat([step.hidden for step in steps])
    seen = [step.taps for step in steps if step.taps is not None]
    taps = torch.cat(seen, 1) if seen else None
    if num_rows > 1:
        index = tensor_of([slot for row in slots for slot in row], tokens.device)
        tokens, hidden = tokens[index], hidden[index]
        taps = None if taps is None else taps[:, index]
    return PackedDraft(tokens, hidden, lengths, taps)
