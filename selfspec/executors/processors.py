"""Logits processors of the caller, asked at every packed position with that position's own prefix."""

from __future__ import annotations

import copy
from collections import abc
from typing import Any

import torch
from torch import Tensor

from selfspec.core import Sequence
from selfspec.params import LogitsProcessor

WATERMARK = "SynthIDTextWatermarkLogitsProcessor"  # of transformers, whose `state` holds all that changes


def process_packed(
    rows: list[Sequence],
    owners: abc.Sequence[int],
    paths: abc.Sequence[abc.Sequence[int]],
    fed: list[int],
    logits: Tensor,
) -> Tensor:
    """Apply each row's processors at every position, each with its own prefix: the content and the drafts before it.

    Args:
        owners: of every packed token, the index of its row.
        paths: of every packed token, the packed drafted tokens on the way to it, with its own.
        fed: every packed token, row after row: the row's last token, then its drafts.
        logits: `[N, vocab]`, at those tokens.
    """
    made = []
    for i, path, one in zip(owners, paths, logits, strict=True):
        instead = torch.full_like(one, torch.nan) if path else None
        made.append(process(rows[i], [fed[at] for at in path], one, instead))
    return torch.stack(made)


def process(row: Sequence, drafted: abc.Sequence[int], logits: Tensor, instead: Tensor | None) -> Tensor:
    """A row's processors on logits `[vocab]`, after its content and the `drafted` tokens.

    The dtype stays: rows that are packed beside this one must not get another.

    Args:
        instead: what it is where they fail, for prefixes or logits that plain decoding may never ask about.

    Raises:
        ValueError: a processor returns something else than logits `[1, vocab]`, or makes one of them NaN. It is the
            row's own fault, as what a processor itself raises.
    """
    if not row.request.params.processors:
        return logits
    with row.blame():
        try:
            return _processed(row, drafted, logits)
        except Exception:
            if instead is None:
                raise
            return instead


def _processed(row: Sequence, drafted: abc.Sequence[int], logits: Tensor) -> Tensor:
    ids = torch.tensor([[*row.token_ids, *drafted]], device=logits.device)
    scores: Any = logits[None].clone()
    names, are_nan = list[str](), [scores.isnan().any()]
    for number, one in enumerate(_standing_at(row, drafted)):
        names.append(f"logits_processors[{number}] ({getattr(one, '__qualname__', type(one).__name__)})")
        try:
            scores = one(ids, scores)
        except Exception as problem:
            problem.add_note(f"{names[-1]} raised it, asked about the token at position {ids.shape[1]}")
            raise
        shape, dtype = tuple(getattr(scores, "shape", ())), getattr(scores, "dtype", None)
        if not isinstance(scores, Tensor) or shape != (1, len(logits)) or not scores.is_floating_point():
            raise ValueError(
                f"{names[-1]} must return a tensor of logits [1, {len(logits)}], got a {type(scores).__name__} of "
                f"shape {[*shape]} and dtype {dtype} at position {ids.shape[1]}"
            )
        are_nan.append(scores.isnan().any())
    where = torch.stack(are_nan).tolist()  # one copy to the host; a later processor may have removed them
    if where[-1] and not where[0]:
        raise ValueError(
            f"{names[where.index(True) - 1]} must return logits, got NaN at position {ids.shape[1]}; return -inf for a "
            "token that must not be picked"
        )
    processed: Tensor = scores[0].to(logits.dtype)
    return processed


def _standing_at(row: Sequence, drafted: abc.Sequence[int]) -> abc.Sequence[LogitsProcessor]:
    """A row's processors, to be called after its content and the `drafted` tokens.

    Those with a state are copies of what was called one token before. A verification asks in order, so that their state
    comes from the target's logits alone; what a draft leaves behind is asked by that draft alone.
    """
    given = row.request.params.processors
    if not any(_has_state(one) for one in given):
        return given
    known, output = row.processors, (*row.completion_token_ids, *drafted)
    before = known.get(output[:-1], given) if output else given
    if not drafted:
        known.clear()
        if output:
            known[output[:-1]] = [*before]
    copies = [_copied(one) for one in before]
    known[output] = copies
    return known[output]


def _has_state(processor: Any) -> bool:
    """Whether it says so, by a method `copy` or `rollback`; lists have a `copy` of another meaning."""
    can = callable(getattr(processor, "copy", None)) or callable(getattr(processor, "rollback", None))
    return (can and not isinstance(processor, list)) or type(processor).__name__ == WATERMARK


def _copied(processor: Any) -> Any:
    """One that goes on from the same state; functions of the prefix are their own copies."""
    if not _has_state(processor):
        return processor
    if callable(getattr(processor, "copy", None)):
        return processor.copy()
    if callable(getattr(processor, "rollback", None)):
        return copy.deepcopy(processor)  # in place of a rollback, which would need calls in the order of drafts
    made = copy.copy(processor)
    made.state = copy.deepcopy(processor.state)
    return made
