"""What could have been: the best static setting in hindsight, and the optimum of one who knows every draft's fate.

Static settings draft by one exit layer, or by copies of the layers below it. The clairvoyant has all of them, and every
other source of drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eval.round_costs import CostGrid
from eval.traces import Bools, Trace
from selfspec.control.costs import CONTEXT
from selfspec.control.plan import DRAFTS
from selfspec.drafting.prompt_lookup import Lookup, num_right

THRESHOLDS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
MOST_DRAFTED = 18
MOST_ACCEPTED = 64  # longest draft of the clairvoyant


class Static(NamedTuple):
    """One setting for all rounds; exit_layer None is plain decoding."""

    exit_layer: int | None
    num_draft_tokens: int
    min_confidence: float
    seconds: float
    copies: bool = False  # in 4 bits


def plain_seconds(traces: Sequence[Trace], costs: CostGrid) -> float:
    return sum(costs.plain_at(t.prompt_length + i) for t in traces for i in range(len(t.tokens)))


def runs(hits: Bools) -> np.ndarray:
    """Consecutive hits from each position on, along the last axis."""
    out = np.zeros(hits.shape, np.int64)
    out[..., -1] = hits[..., -1]
    for i in range(hits.shape[-1] - 2, -1, -1):
        out[..., i] = np.where(hits[..., i], out[..., i + 1] + 1, 0)
    return out


def drafted(trace: Trace, line: int, threshold: float, accepted: np.ndarray) -> np.ndarray:
    """Tokens a draft without a cap writes from each position on before a confidence below `threshold` stops it."""
    n = len(trace.tokens)
    limit = np.float64(threshold)  # as decoding compares: a float32 that is the nearest to 0.9 lies below 0.9
    low = trace.confidences[line] < limit
    to_low = runs(~low)  # confident tokens from here on
    wrong_low = trace.wrong[line] < limit  # [n, steps]; NaN is not low
    recorded = trace.wrong.shape[2]
    steps = np.where(wrong_low.any(1), wrong_low.argmax(1), recorded) if recorded else np.zeros(n, np.int64)
    out = np.empty(n, np.int64)
    for i in range(n):
        miss = i + accepted[i]
        if to_low[i] <= accepted[i] and i + to_low[i] < n:  # an unsure token at or before the first wrong one
            out[i] = to_low[i] + 1
        else:
            out[i] = accepted[i] + 2 + steps[miss] if miss < n else n - i
    return out


def drafted_by_copies(trace: Trace, line: int, threshold: float) -> np.ndarray:
    """The same of copies."""
    low = trace.copied[line] < np.float64(threshold)  # NaN is not low
    return np.where(low.any(1), low.argmax(1) + 1, MOST_ACCEPTED)


def statics(traces: Sequence[Trace], costs: CostGrid, thresholds: Sequence[float] = THRESHOLDS) -> Iterator[Static]:
    """Every static setting with the seconds it takes for all traces together."""
    yield Static(None, 0, 0.0, plain_seconds(traces, costs))
    num_layers = traces[0].num_layers
    runs_of = [runs(trace.hits) for trace in traces]
    for e, copies in product(range(1, num_layers), (False, True)):
        if copies and e > costs.half:
            continue
        told = [copies and e <= len(trace.copied) for trace in traces]  # else copies are taken to draft as layers do
        accepted = [
            t.copied_right[e - 1] if by_copies else a[e - 1]
            for t, a, by_copies in zip(traces, runs_of, told, strict=True)
        ]
        table = costs.of(e, copies)
        for threshold in thresholds:
            lengths = [
                drafted_by_copies(t, e - 1, threshold) if by_copies else drafted(t, e - 1, threshold, a)
                for t, a, by_copies in zip(traces, accepted, told, strict=True)
            ]
            for d in range(1, MOST_DRAFTED + 1):
                walked = zip(traces, accepted, lengths, strict=True)
                yield Static(e, d, threshold, sum(_walk(t, costs, table, d, a, n) for t, a, n in walked), copies)


def _walk(
    trace: Trace,
    costs: CostGrid,
    table: tuple[list[float], list[float]],
    most: int,
    accepted: np.ndarray,
    lengths: np.ndarray,
) -> float:
    base, slope = table
    runs_, stops = accepted.tolist(), lengths.tolist()
    at, n, seconds = 0, len(trace.tokens), 0.0
    while at < n:
        context = trace.prompt_length + at
        length = min(most, n - at - 1, stops[at])
        if length == 0:
            seconds += costs.plain_at(context)
            at += 1
            continue
        seconds += base[length] + slope[length] * max(0, context - CONTEXT)
        at += min(runs_[at], length) + 1
    return seconds


def best_static(traces: Sequence[Trace], costs: CostGrid, thresholds: Sequence[float] = THRESHOLDS) -> Static:
    """The setting that would have been fastest over all the traces together."""
    return min(statics(traces, costs, thresholds), key=lambda s: s.seconds)


def by_lookup(trace: Trace, longest: int) -> NDArray[np.int64]:
    """Tokens that a draft by lookup of `longest` tokens would have accepted at each position; -1: it has no match."""
    content = list(trace.prompt)
    lookup, out = Lookup(content), np.empty(len(trace.tokens), np.int64)
    for i, token in enumerate(trace.tokens):
        guess = lookup.draft(longest)
        out[i] = num_right(guess.tokens, trace.tokens[i:]) if guess.match else -1
        content.append(token)
    return out


def clairvoyant(trace: Trace, costs: CostGrid, drafts: Sequence[str] = DRAFTS) -> float:
    """Seconds of the fastest schedule for one who knows beforehand what every draft comes to (dynamic programming).

    A round is plain, or drafts what will be accepted, by any of `drafts`; where layers draft, copies of them may too. A
    wrong token, drafted alone, is allowed as well: where a table makes that cheaper than a plain round, static settings
    have it too, and the bound must hold. So is one wrong token with the right one beside it.
    """
    n, most = len(trace.tokens), costs.base.shape[1] - 1
    accepted = runs(trace.hits)
    copied = trace.copied_right if len(trace.copied) else accepted
    accepted = np.minimum(np.concatenate((accepted, copied[: costs.half])), most)  # [L - 1 + half, n]
    accepted = accepted if "exit" in drafts else accepted[:0]
    found = by_lookup(trace, most) if "lookup" in drafts else np.full(n, -1)
    rest = np.zeros(n + most + 2)
    lengths = np.arange(most + 1)
    for i in range(n - 1, -1, -1):
        context = trace.prompt_length + i
        best = costs.plain_at(context) + rest[i + 1]
        if i < n - 1:
            by_exit = costs.at(context)[: len(accepted)]
            by_line = np.concatenate((by_exit, costs.by_lookup_at(context)[None]))
            of_round = by_line if found[i] >= 0 else by_line[:-1]
            longest = np.minimum(np.append(accepted[:, i], found[i])[: len(of_round)], n - i - 1)
            options = np.where(lengths <= longest[:, None], of_round + rest[i + 1 : i + most + 2], np.inf)
            wrong = of_round[longest == 0, 1] + rest[i + 1]
            best = min(best, options[:, 1:].min(initial=np.inf), wrong.min(initial=np.inf))
            if "tree" in drafts:
                best = min(best, _with_second(trace, costs, accepted[:, i], i, rest))
        rest[i] = best
    return float(rest[0])


def _with_second(trace: Trace, costs: CostGrid, accepted: NDArray[np.int64], i: int, rest: Any) -> float:
    """Seconds from position i on, where the first round drafts up to a wrong token, and the right one beside it."""
    n, most, exits = len(trace.tokens), costs.base.shape[1] - 1, trace.num_layers - 1
    lines = np.flatnonzero((accepted + 1 <= most) & (i + accepted + 3 <= n))
    lines = lines[trace.seconds[lines % exits, i + accepted[lines]]]
    if not len(lines):
        return float("inf")
    right = accepted[lines]
    return float((costs.with_second_at(trace.prompt_length + i)[lines, right + 1] + rest[i + right + 2]).min())
