"""Reading prompts, in chunks, all rows packed end to end; and the look at a prompt's last positions for the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.control.plan import SEED_POSITIONS, Policy
from selfspec.executors.penalties import Penalties, Text
from selfspec.executors.picker import Picker
from selfspec.executors.rows import Row
from selfspec.executors.shadow import shadow_picks
from selfspec.model.kv_cache import PackedRows, PagedCache, Span, tensor_of
from selfspec.model.stack import Stack, Taps


class _Look(NamedTuple):
    row: Row
    layers: tuple[int, ...]
    where: slice  # the positions to look at, in the packed call
    first: int  # content index of the first of them


def prefill(stack: Stack, cache: PagedCache, picker: Picker, rows: Sequence[Row], budget: int, policy: Policy) -> None:
    """Write keys and values of at most `budget` prompt tokens: all but each prompt's last, which the first round feeds.

    Rows come in order; a prompt's last positions are shown to the policy where it asks for that.
    """
    if all(row.num_cached + 1 >= len(row.content) for row in rows):
        return
    tokens: list[int] = []
    spans, fed, looks = [], [], []
    for row in rows:
        count = min(len(row.content) - 1 - row.num_cached, budget)
        if count <= 0:
            continue
        look = _look(row, row.num_cached, count, len(tokens), policy)
        looks += [look] if look is not None else []
        spans.append(Span(row.pages, row.num_cached, count))
        tokens += row.content[row.num_cached : row.num_cached + count]
        fed.append((row, count))
        budget -= count
    if not spans:
        return
    taps: Taps | None = dict.fromkeys(layer for look in looks for layer in look.layers) if looks else None
    packed = PackedRows(cache, spans, stack.device)
    packed.plans["prompts"] = [len(row.content) - 1 for row, _ in fed]  # read in exact mode
    last = stack.run(packed, 0, stack.num_layers, tensor_of(tokens, stack.device), taps)
    for row, count in fed:
        row.num_cached += count
    for look in looks:
        _show(stack, picker, look, last, taps or {}, policy)


def _look(row: Row, start: int, count: int, at: int, policy: Policy) -> _Look | None:
    """What to look at of the prompt tokens [start, start + count), which begin at `at` in the packed call."""
    first = max(start, len(row.content) - 1 - SEED_POSITIONS)
    if row.request.logits_processor or not row.request.speculative or first >= start + count:
        return None
    layers = tuple(policy.seed_layers(row.state))
    return _Look(row, layers, slice(at + first - start, at + count), first) if layers else None


def _show(stack: Stack, picker: Picker, look: _Look, last: Tensor, taps: Taps, policy: Policy) -> None:
    final = last[look.where]
    sampling, content, start = look.row.request.sampling, look.row.content, look.first + 1
    samplings = [sampling] * len(final)
    positions = range(start, start + len(final))
    logits, penalty = stack.logits(final), None
    if sampling.penalizes:
        as_prompt = replace(sampling, presence_penalty=0.0, frequency_penalty=0.0)  # nothing is output yet
        penalties = Penalties([Text(as_prompt, content[:start], start)], stack.vocab_size, stack.device)
        penalty = penalties.along([content[start : start + len(final)]])
        logits = penalty.applied(logits)
    judged = picker(logits, samplings, positions).tokens
    hidden = torch.stack([taps[layer][look.where] for layer in look.layers])  # type: ignore[index]
    seen = shadow_picks(stack, picker, look.layers, hidden, samplings, positions, logits, judged, penalty=penalty)
    policy.seed(look.row.state, seen)
