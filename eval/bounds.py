"""Bounds for a policy: the best static setting in hindsight, and the clairvoyant schedule.

A static setting always drafts by one exit layer, or by copies of the layers below it. The clairvoyant schedule knows
the outcome of every draft and may use any drafter in any round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eval.traces import Bools, Trace
from selfspec.control.costs import CONTEXT, Costs
from selfspec.control.drafters import deepest_copy
from selfspec.core import LOOKUP
from selfspec.drafting.lookup import TextLookup
from selfspec.kernels.pick import num_accepted
from selfspec.params import DRAFTERS

MAX_DRAFTED = 18  # longest draft of a static setting
MAX_ACCEPTED = 64  # longest draft of the clairvoyant schedule

Ints = NDArray[np.int64]
Seconds = NDArray[np.float64]


class CostGrid:
    """Seconds of a round of one row, as arrays by drafter and drafted tokens 0..longest.

    Arrays are for CONTEXT cached tokens; the slopes are seconds per cached token beyond it.

    Attributes:
        drafters: exit layer, and whether copies draft: all exit layers, then the first `num_copied` with copies.
        rounds, slopes: `[drafters, longest + 1]`.
    """

    def __init__(self, costs: Costs, longest: int) -> None:
        layers, drafted = costs.num_layers, np.arange(longest + 1)
        self.plain = costs.plain_round(1)
        self.by_lookup = np.array([costs.round(LOOKUP, [d]) for d in range(longest + 1)])
        self.num_copied = deepest_copy(layers) if costs.copies is not None else 0
        self.drafters = [(e, False) for e in range(1, layers)] + [(e, True) for e in range(1, self.num_copied + 1)]
        self.rounds = np.array(
            [[costs.round(e, [d], CONTEXT, copies=copies) for d in range(longest + 1)] for e, copies in self.drafters]
        )
        # Seconds of a layer per cached token: for the first token of a pass, and for each additional one.
        one = costs.reading(1, CONTEXT + 1) / layers
        additional = costs.reading(1, CONTEXT + 1, 2) / layers - one
        verified = one + additional * drafted
        self.plain_slope, self.lookup_slope = layers * one, layers * verified
        # The last drafted token does not run through copies; after copies all layers verify.
        self.slopes = np.array(
            [
                one * drafted * e + layers * verified if copies else one * (drafted + 1) * e + (layers - e) * verified
                for e, copies in self.drafters
            ]
        )
        self.round_lists = list(zip(self.rounds.tolist(), self.slopes.tolist(), strict=True))  # lists are faster

    def plain_at(self, context: float) -> float:
        """Seconds of a plain round."""
        return float(self.plain + self.plain_slope * max(0.0, context - CONTEXT))

    def by_lookup_at(self, context: float) -> Seconds:
        """`[longest + 1]`: seconds of rounds that draft by lookup."""
        return self.by_lookup + self.lookup_slope * max(0.0, context - CONTEXT)

    def at(self, context: float) -> Seconds:
        """`[drafters, longest + 1]`: seconds of rounds."""
        return self.rounds + self.slopes * max(0.0, context - CONTEXT)


class Static(NamedTuple):
    """One setting for all rounds, and its seconds over all traces; exit_layer None is plain decoding."""

    exit_layer: int | None
    num_speculative_tokens: int
    seconds: float
    copies: bool = False  # 4-bit copies of the layers draft


def plain_seconds(traces: Sequence[Trace], costs: CostGrid) -> float:
    """Seconds of plain decoding over all traces."""
    return sum(costs.plain_at(t.prompt_length + i) for t in traces for i in range(len(t.tokens)))


def runs(hits: Bools) -> Ints:
    """The number of consecutive hits from each position, along the last axis."""
    out = np.zeros(hits.shape, np.int64)
    out[..., -1] = hits[..., -1]
    for i in range(hits.shape[-1] - 2, -1, -1):
        out[..., i] = np.where(hits[..., i], out[..., i + 1] + 1, 0)
    return out


def statics(traces: Sequence[Trace], costs: CostGrid) -> Iterator[Static]:
    """Every static setting with its seconds over all traces."""
    yield Static(None, 0, plain_seconds(traces, costs))
    runs_of = [runs(trace.hits) for trace in traces]
    for number, (e, copies) in enumerate(costs.drafters):
        # Without recorded drafts of copies, copies are assumed to draft as the layers do.
        recorded = [copies and e <= len(trace.copied) for trace in traces]
        accepted = [
            t.copied_right[e - 1].astype(np.int64) if by_copies else a[e - 1]
            for t, a, by_copies in zip(traces, runs_of, recorded, strict=True)
        ]
        rows = [(t, a.tolist()) for t, a in zip(traces, accepted, strict=True)]
        for d in range(1, MAX_DRAFTED + 1):
            yield Static(e, d, sum(_walk(t, costs, number, d, a) for t, a in rows), copies)


def _walk(trace: Trace, costs: CostGrid, drafter: int, limit: int, accepted: list[int]) -> float:
    """Seconds of one output with drafts of at most `limit` tokens.

    Args:
        accepted: per position, accepted tokens of a draft without that limit.
    """
    base, slope = costs.round_lists[drafter]
    at, n, seconds = 0, len(trace.tokens), 0.0
    while at < n:
        context = trace.prompt_length + at
        length = min(limit, n - at - 1)
        if length == 0:
            seconds += costs.plain_at(context)
            at += 1
        else:
            seconds += base[length] + slope[length] * max(0, context - CONTEXT)
            at += min(accepted[at], length) + 1
    return seconds


def clairvoyant(trace: Trace, costs: CostGrid, drafters: Sequence[str] = DRAFTERS) -> float:
    """Seconds of the fastest schedule that knows the outcome of every draft, by dynamic programming.

    A round is plain, or drafts only tokens that will be accepted, by any of `drafters`. A draft of one wrong token is
    allowed too: a cost table may make it cheaper than a plain round, and static settings use it.
    """
    n, longest_draft = len(trace.tokens), costs.rounds.shape[1] - 1
    accepted = runs(trace.hits)
    copied = trace.copied_right if len(trace.copied) else accepted
    accepted = np.minimum(np.concatenate((accepted, copied[: costs.num_copied])), longest_draft)  # [drafters, n]
    accepted = accepted if "exit" in drafters else accepted[:0]
    found = _by_lookup(trace, longest_draft) if "lookup" in drafters else np.full(n, -1)
    rest = np.zeros(n + longest_draft + 2)  # seconds from each position to the end
    lengths = np.arange(longest_draft + 1)
    for i in range(n - 1, -1, -1):
        context = trace.prompt_length + i
        best = costs.plain_at(context) + rest[i + 1]
        if i < n - 1:
            of_round = costs.at(context)[: len(accepted)]
            if found[i] >= 0:
                of_round = np.concatenate((of_round, costs.by_lookup_at(context)[None]))
            longest = np.minimum(np.append(accepted[:, i], found[i])[: len(of_round)], n - i - 1)
            options = np.where(lengths <= longest[:, None], of_round + rest[i + 1 : i + longest_draft + 2], np.inf)
            wrong = of_round[longest == 0, 1] + rest[i + 1]
            best = min(best, options[:, 1:].min(initial=np.inf), wrong.min(initial=np.inf))
        rest[i] = best
    return float(rest[0])


def _by_lookup(trace: Trace, longest: int) -> Ints:
    """The number of accepted tokens of a lookup draft of `longest` tokens at each position; -1: there is no match."""
    content = list(trace.prompt)
    lookup, out = TextLookup(content), np.empty(len(trace.tokens), np.int64)
    for i, token in enumerate(trace.tokens):
        guess = lookup.draft(longest)
        out[i] = num_accepted(guess.token_ids, trace.tokens[i:]) if guess.match_length else -1
        content.append(token)
    return out
