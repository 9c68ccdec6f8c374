"""Prefill: prompts in chunks, with all rows packed into one call, and probes of each prompt's last positions."""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.control.plan import SEED_POSITIONS, Policy
from selfspec.core import Sequence
from selfspec.executors.final_states import before_each, states_of
from selfspec.executors.logprobs import TokenLogprobs, token_logprobs
from selfspec.executors.penalties import Penalties, Text
from selfspec.executors.picker import Picker
from selfspec.executors.shadow import shadow_picks
from selfspec.model.kv_cache import PackedRows, PagedCache, Span, tensor_of
from selfspec.model.split_model import SplitModel, Taps

SCORED = 128  # positions whose logits are held at once


class _Probe(NamedTuple):
    """The layers and prompt positions whose shadow picks a policy receives."""

    row: Sequence
    layers: tuple[int, ...]
    where: slice  # the probed positions in the packed call
    first: int  # content index of the first probed position


def prefill(
    split: SplitModel, cache: PagedCache, picker: Picker, rows: list[Sequence], budget: int, policy: Policy
) -> None:
    """Write keys and values of at most `budget` prompt tokens.

    The last token of each prompt is left to the first round. If the policy requests it, a prompt's last positions are
    probed (`Policy.seed_layers`, `Policy.seed`). Rows that ask for them get the log-probabilities of their prompts.
    """
    if all(row.num_cached + 1 >= len(row.token_ids) for row in rows):
        return
    tokens: list[int] = []
    spans, fed, probes = [], [], []
    for row, count in zip(rows, shares([len(row.token_ids) - 1 - row.num_cached for row in rows], budget), strict=True):
        if count <= 0:
            continue
        probe = _probe(row, row.num_cached, count, len(tokens), policy)
        probes += [probe] if probe is not None else []
        spans.append(Span(row.pages, row.num_cached, count))
        tokens += row.token_ids[row.num_cached : row.num_cached + count]
        fed.append((row, count))
    if not spans:
        return
    taps: Taps | None = dict.fromkeys(layer for probe in probes for layer in probe.layers) if probes else None
    packed = PackedRows(cache, spans, split.device)
    packed.plans["prompts"] = [len(row.token_ids) - 1 for row, _ in fed]  # read in exact mode
    last = split.run(packed, 0, split.num_layers, tensor_of(tokens, split.device), taps)
    before = before_each(states_of(split, [row for row, _ in fed]), last, [count for _, count in fed])
    at = 0
    for row, count in fed:
        logprobs = _prompt_logprobs(split, row, last[at : at + count])
        row.prompt_logprobs += logprobs
        row.num_cached += count
        at += count
        if split.exit_heads is not None:
            row.final_state, row.final_at = last[at - 1].clone(), row.num_cached - 1
    for probe in probes:
        _seed_policy(split, picker, probe, last, before, taps or {}, policy)


def _prompt_logprobs(split: SplitModel, row: Sequence, last: Tensor) -> list[TokenLogprobs]:
    """Of the tokens after those just read, if the request asks for them. `last`: hidden states after the last layer."""
    wanted = row.request.params.prompt_logprobs
    if wanted is None:
        return []
    logprobs: list[TokenLogprobs] = []
    tokens = row.token_ids[row.num_cached + 1 : row.num_cached + 1 + len(last)]
    for at in range(0, len(last), SCORED):
        logprobs += token_logprobs(split.logits(last[at : at + SCORED]), tokens[at : at + SCORED], wanted)
    return logprobs


def shares(lacking: abc.Sequence[int], budget: int) -> list[int]:
    """How many of the tokens that rows lack each of them reads.

    Rows read in the order in which they joined. Where the first one lacks more than the budget, it gets half of it, so
    that it comes to its end whatever joins later, and the other half goes to those that lack least, so that a short
    prompt does not wait for a long one.
    """
    taken = [0] * len(lacking)
    reading = [i for i, lack in enumerate(lacking) if lack > 0]
    by_need = sorted(reading[1:], key=lambda i: lacking[i])
    half = budget // 2 if reading and lacking[reading[0]] > budget else 0
    for most, order in ((budget - half, reading[:1]), (half, by_need), (budget, reading)):
        for i in order:
            count = min(lacking[i] - taken[i], most, budget)
            taken[i] += count
            most -= count
            budget -= count
    return taken


def _probe(row: Sequence, start: int, count: int, at: int, policy: Policy) -> _Probe | None:
    """The probe of the prompt tokens [start, start + count), which begin at `at` in the packed call; None: no probe."""
    first = max(start, len(row.token_ids) - 1 - SEED_POSITIONS)
    if row.has_processors or not row.request.params.speculative or first >= start + count:
        return None
    layers = tuple(policy.seed_layers(row))
    return _Probe(row, layers, slice(at + first - start, at + count), first) if layers else None


def _seed_policy(
    split: SplitModel,
    picker: Picker,
    probe: _Probe,
    last: Tensor,
    before: Tensor | None,
    taps: Taps,
    policy: Policy,
) -> None:
    """Compute the shadow picks of a probe and give them to the policy.

    Args:
        last: hidden states after the last layer.
        before: those of the tokens before, which exit heads read; None: there are no heads.
    """
    final = last[probe.where]
    params, content, start = probe.row.request.params, probe.row.token_ids, probe.first + 1
    many = [params] * len(final)
    positions = range(start, start + len(final))
    logits, penalty = split.logits(final), None
    if params.penalizes:
        as_prompt = replace(params, presence_penalty=0.0, frequency_penalty=0.0)  # there is no output yet
        penalties = Penalties([Text(as_prompt, content[:start], start)], split.vocab_size, split.device)
        penalty = penalties.along([content[start : start + len(final)]])
        logits = penalty.applied(logits)
    picks = picker(logits, many, positions).tokens
    hidden = torch.stack([taps[layer][probe.where] for layer in probe.layers])  # type: ignore[index]
    before = None if before is None else before[probe.where]
    given = hidden, many, positions, logits, picks
    shadow = shadow_picks(split, picker, probe.layers, *given, penalty=penalty, last=before)
    policy.seed(probe.row, shadow)
