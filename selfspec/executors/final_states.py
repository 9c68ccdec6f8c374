"""The model's final state of the token before each row's last one, which exit heads read.

Verification computes it, and the `Sequence` keeps it with its token's place. Where it is not that of the last token
with keys and values, it is unknown: drafts read zeros, and no token changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import overload

import torch
from torch import Tensor

from selfspec.core import RowRound
from selfspec.core import Sequence as Row
from selfspec.model.fingerprint import hidden_size_of
from selfspec.model.split_model import SplitModel


def states_of(split: SplitModel, rows: Sequence[Row]) -> Tensor | None:
    """`[rows, hidden_size]`, zeros where unknown; None for a model without exit heads, for which none are kept."""
    if split.exit_heads is None:
        return None
    zeros = torch.zeros(hidden_size_of(split), dtype=split.hidden_dtype, device=split.device)
    return torch.stack([own_state(row, zeros) for row in rows])


def own_state(row: Row, unknown: Tensor) -> Tensor:
    """A row's state `[hidden_size]`; `unknown` where it is not known."""
    is_known = row.final_state is not None and row.final_at == row.num_cached - 1
    return row.final_state if is_known else unknown  # type: ignore[return-value]


@overload
def before_each(states: Tensor, finals: Tensor, counts: Iterable[int]) -> Tensor: ...
@overload
def before_each(states: Tensor | None, finals: Tensor | None, counts: Iterable[int]) -> Tensor | None: ...
def before_each(states: Tensor | None, finals: Tensor | None, counts: Iterable[int]) -> Tensor | None:
    """The final state one token before each of N packed tokens, `[N, hidden_size]`; None where states are None.

    Args:
        states: `[rows, hidden_size]`, those before each row's first token.
        finals: `[N, hidden_size]`, of the tokens themselves.
        counts: the tokens of each row.
    """
    if states is None or finals is None:
        return None
    starts = torch.tensor([0, *accumulate(counts)][:-1], device=finals.device)
    shifted = finals.roll(1, 0)
    shifted[starts] = states
    return shifted


def keep_finals(outputs: Sequence[RowRound], finals: Tensor, counts: Iterable[int]) -> None:
    """Keep the states of the last accepted tokens of a round, before its tokens are appended.

    Args:
        finals: `[N, hidden_size]`, of the packed tokens that were verified.
        counts: the tokens of each row.
    """
    for output, start in zip(outputs, accumulate(counts, initial=0), strict=False):
        row, place = output.sequence, len(output.token_ids) - 1
        if place >= 0:
            row.final_state, row.final_at = finals[start + place].clone(), row.num_tokens - 1 + place
