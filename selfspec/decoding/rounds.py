"""One round: draft, verify, accept. A round with no draft is plain decoding, through the same code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.control.laps import Seconds
from selfspec.control.plan import LOOKUP, Plan
from selfspec.decoding.afterwards import Teach, hand_on, with_divergences, with_shadows
from selfspec.decoding.ahead import Ahead
from selfspec.decoding.choose import Chooser
from selfspec.decoding.pick import filtered
from selfspec.decoding.picker import Picker
from selfspec.decoding.process import process_packed
from selfspec.decoding.row import Row
from selfspec.decoding.verdict import Verdict, walk
from selfspec.decoding.whole import compiled_round, whole_round
from selfspec.drafting.at_once import draft_at_once, draft_unread
from selfspec.drafting.exit import Draft, DraftRow, draft_by_exit
from selfspec.drafting.lookup import draft_by_lookup, draft_trees
from selfspec.target.cache import PackedRows, PagedCache, Span, tensor_of
from selfspec.target.stack import Stack, Taps


def decode_round(
    stack: Stack,
    cache: PagedCache,
    rows: Sequence[Row],
    plan: Plan,
    seconds: Seconds,
    teach: Teach | None = None,
    picker: Picker | None = None,
    whole: bool = False,
    ahead: Ahead | None = None,
) -> list[Verdict]:
    """Draft and verify once for every row. Rows are not changed; keys and values are written beyond `num_cached`.

    A round that is asked for `whole` is decoded as one recording, where the stack has a runner that offers it; its time
    is then told as `verify`.
    Rounds that were decoded with this one wait with `ahead`.
    """
    picker = picker or Picker(stack)
    if teach is None:
        done = _in_one_call(stack, cache, rows, plan, seconds, picker, whole, ahead)
        if done is not None:
            return done
    if teach is not None and plan.draft_bits is not None:
        plan = replace(plan, draft_bits=None)  # lessons are hidden states of the layers themselves
    tapped = plan.shadow.layers if plan.shadow is not None else ()
    draft, chooser = _draft(stack, cache, rows, plan, seconds, picker, tapped)
    start = 0 if draft.is_unread else plan.exit_layer or 0
    trees = draft.trees or [None] * len(rows)
    spans = [
        Span(row.pages, len(row.content) - 1, n + 1, tree)
        for row, n, tree in zip(rows, draft.lengths, trees, strict=True)
    ]
    packed = PackedRows(cache, spans, stack.device)
    seconds.lap("rest" if plan.exit_layer is None else "draft")
    later: Taps | None = dict.fromkeys(layer for layer in tapped if layer > start) if tapped else None
    hidden = stack.run(packed, start, stack.num_layers, draft.hidden, later)
    seconds.lap("verify")
    logits = stack.logits(hidden)
    seconds.lap("head")
    verdicts, scores = _accept(
        rows, draft, logits, [at + 1 for span in spans for at in span.positions()], seconds, picker
    )
    if draft.trees is not None:
        settle(cache, rows, verdicts)
    if chooser is not None:
        verdicts = _with_chosen(verdicts, chooser, plan, scores)
    taps: list[Tensor] = []
    if plan.shadow is not None:
        seconds.lap("rest")
        seen = [h for h in (later or {}).values() if h is not None]
        taps = [*([] if draft.taps is None else [draft.taps]), *([torch.stack(seen)] if seen else [])]
        verdicts = with_shadows(stack, picker, rows, plan, verdicts, taps, logits)
        seconds.lap("shadow")
    if teach is not None:
        hand_on(teach, rows, plan, verdicts, draft.hidden, taps, logits)
    return verdicts


def _in_one_call(
    stack: Stack,
    cache: PagedCache,
    rows: Sequence[Row],
    plan: Plan,
    seconds: Seconds,
    picker: Picker,
    whole: bool,
    ahead: Ahead | None,
) -> list[Verdict] | None:
    """The same as one recording or one compiled function, where there is either for such a round; else None."""
    done = whole_round(stack, cache, rows, plan) if whole else None
    if done is not None:
        seconds.lap("verify")
        return done
    return compiled_round(stack, cache, rows, plan, picker, seconds, ahead)


def _with_chosen(verdicts: list[Verdict], chooser: Chooser, plan: Plan, scores: Tensor) -> list[Verdict]:
    """With what the plan asks of the layer that drafted."""
    if plan.reads_confidence:
        verdicts = [v._replace(confidences=tuple(sure)) for v, sure in zip(verdicts, chooser.confidences, strict=True)]
    return with_divergences(verdicts, chooser, scores) if plan.keep_divergence else verdicts


def settle(cache: PagedCache, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> None:
    """Accepted nodes that lie elsewhere than at their positions: move their keys and values there."""
    for row, verdict in zip(rows, verdicts, strict=True):
        away = [i for i, node in enumerate(verdict.path) if node != i]
        if away:
            base = len(row.content) - 1
            cache.move(row.pages, [base + verdict.path[i] for i in away], [base + i for i in away])


def _draft(
    stack: Stack,
    cache: PagedCache,
    rows: Sequence[Row],
    plan: Plan,
    seconds: Seconds,
    picker: Picker,
    tapped: Sequence[int],
) -> tuple[Draft, Chooser | None]:
    """The round's draft, and who picked its tokens, if a layer drafted."""
    if plan.exit_layer == LOOKUP and plan.trees is not None:
        return draft_trees([row.content[-1] for row in rows], plan.trees, stack.device), None
    if plan.exit_layer == LOOKUP:
        return draft_by_lookup([row.guesser.lookup for row in rows], plan.draft_lengths, stack.device), None
    ends = [row.content[-1] for row in rows]
    if plan.exit_layer is None:
        last = tensor_of(ends, stack.device)
        return Draft(last, last, [0] * len(rows)), None
    places = [DraftRow(row.pages, len(row.content) - 1, n) for row, n in zip(rows, plan.draft_lengths, strict=True)]
    chooser = Chooser(stack, picker, rows, plan, seconds)
    beside = None if plan.second_choices is None else chooser.branches
    rounded = plan.draft_bits is not None
    inner = [] if rounded else [layer for layer in tapped if layer < plan.exit_layer]
    written = chooser.at_once(cache, places, ends, inner)
    if written is not None and rounded:
        return draft_unread(ends, written, beside), chooser
    if written is not None:
        return draft_at_once(stack, cache, places, ends, plan.exit_layer, written, inner, beside), chooser
    last = torch.tensor(ends, device=stack.device)
    return draft_by_exit(stack, cache, places, last, plan.exit_layer, chooser, tapped, beside), chooser


def _drawable(row: Row, path: Sequence[int], drawn: Sequence[int]) -> Sequence[int]:
    """The path as far as sampling can draw a token at its nodes; the row may end before it comes to the next one.

    Args:
        drawn: per node, 0 where it cannot.

    Raises:
        ValueError: not even at the first, as `generate` raises then; it is the row's own fault.
    """
    if drawn[path[0]]:
        return path[: next((i for i, node in enumerate(path) if not drawn[node]), len(path))]
    with row.blamed():
        raise ValueError(
            f"no token can be sampled at position {len(row.content)}, where all logits are -inf or one of them is no "
            "number; let logits_processor leave a token"
        )


def _accept(
    rows: Sequence[Row], draft: Draft, logits: Tensor, positions: Sequence[int], seconds: Seconds, picker: Picker
) -> tuple[list[Verdict], Tensor]:
    """The longest prefix of each draft that equals the target's picks, and the pick after it.

    Also the scores `[N, vocab]` that all were picked from.
    """
    owners = [row for row, n in zip(rows, draft.lengths, strict=True) for _ in range(n + 1)]
    if any(row.request.logits_processor for row in rows):
        fed = draft.tokens.tolist()
        scores = process_packed(rows, draft.lengths, fed, logits, draft.trees)
    else:
        scores = logits
    samplings = [row.request.sampling for row in owners]
    picks = picker(scores, samplings, positions).tokens
    known = [draft.tokens, picks]
    if any(sampling.temperature > 0 for sampling in samplings):
        known.append(scores.amax(-1).isfinite().long())  # no token can be drawn where all are -inf, or one is NaN
    if picks.is_cuda:
        fed, chosen, *drawn = torch.stack(known).tolist()  # the round's one copy to the host
    else:
        fed, chosen, *drawn = [one.tolist() for one in known]
    seconds.lap("pick")
    verdicts, at = [], 0
    for i, (row, drafted) in enumerate(zip(rows, draft.lengths, strict=True)):
        guess, own = fed[at + 1 : at + 1 + drafted], chosen[at : at + 1 + drafted]
        tree = None if draft.trees is None else draft.trees[i]
        path: Sequence[int]
        if tree is None:
            accepted = next((i for i, (g, o) in enumerate(zip(guess, own, strict=False)) if g != o), drafted)
            path = range(accepted + 1)
        else:
            path = walk(tree, guess, own)
        if drawn and row.request.sampling.temperature > 0:
            path = _drawable(row, path, drawn[0][at : at + 1 + drafted])
        block = own[: len(path)] if tree is None else [own[node] for node in path]
        kept = slice(at, at + len(path)) if tree is None else [at + node for node in path]
        keep = row.request.keep_logits
        raw = logits[kept].clone() if keep else None
        told = filtered(scores[kept], row.request.sampling).clone() if keep else None
        chain = 0 if draft.chains is None else draft.chains[i]
        verdicts.append(Verdict(guess, path, block, raw, told, tree, chain))
        at += drafted + 1
    return verdicts, scores
