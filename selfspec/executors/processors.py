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
    each = zip(owners, paths, logits, strict=True)
    return torch.stack([process(rows[i], [fed[at] for at in path], one) for i, path, one in each])


def process(row: Sequence, drafted: abc.Sequence[int], logits: Tensor) -> Tensor:
    """A row's processors on logits `[vocab]`, after its content and the `drafted` tokens.

    The dtype stays: rows that are packed beside this one must not get another.

    Raises:
        ValueError: a processor returns something else than logits `[1, vocab]`; it is the row's own fault.
    """
    if not row.request.params.processors:
        return logits
    ids = torch.tensor([[*row.token_ids, *drafted]], device=logits.device)
    scores: Any = logits[None].clone()
    with row.blame():
        for one in _standing_at(row, drafted):
            scores = one(ids, scores)
        shape = tuple(getattr(scores, "shape", ()))
        if not isinstance(scores, Tensor) or shape != (1, len(logits)):
            raise ValueError(
                f"logits_processors must return a tensor of logits [1, {len(logits)}], "
                f"got a {type(scores).__name__} of shape {[*shape]}"
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
