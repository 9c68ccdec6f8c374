"""One round: draft, verify, accept. A round with no draft is plain decoding, through the same code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.control.plan import LOOKUP, Looked, Plan, RowOutcome, Seconds, Shadow
from selfspec.decoding.choose import Chooser
from selfspec.decoding.pick import filtered, pick
from selfspec.decoding.process import process_packed
from selfspec.decoding.row import Row
from selfspec.decoding.shadow import part_of, shadow_picks
from selfspec.decoding.whole import whole_round
from selfspec.drafting.exit import Draft, DraftRow, draft_by_exit
from selfspec.drafting.lookup import draft_by_lookup
from selfspec.kernels.gumbel import NoiseAhead
from selfspec.target.cache import PackedRows, PagedCache, Span
from selfspec.target.stack import Stack, Taps

# Is given, of one exit layer, what a head could learn from: hidden states `[n, hidden_size]` after it, and the target's
# logits `[n, vocab]` at the same positions. Both are copies.
Teach = Callable[[int, Tensor, Tensor], None]


class Verdict(NamedTuple):
    """What verification decided for one row."""

    drafted: list[int]
    accepted: int
    block: list[int]  # the accepted drafts and the target's own next token, before any cut
    logits: Tensor | None  # [len(block), vocab] when the row keeps them
    scores: Tensor | None
    confidences: tuple[float, ...] = ()  # of the drafted tokens
    divergences: tuple[float, ...] = ()  # at the judged drafted tokens
    shadow: Shadow | None = None

    def outcome(self, request_id: int, num_kept: int, looked: Looked | None = None) -> RowOutcome:
        """What the policy is told, of a row that kept `num_kept` of its drafted tokens."""
        drafted = num_kept if num_kept < self.accepted else len(self.drafted)  # beyond the row's end nothing was judged
        return RowOutcome(
            request_id, drafted, num_kept, self.confidences[:drafted], self.divergences[:drafted], self.shadow, looked
        )


def decode_round(
    stack: Stack,
    cache: PagedCache,
    rows: Sequence[Row],
    plan: Plan,
    seconds: Seconds,
    teach: Teach | None = None,
    noise: NoiseAhead | None = None,
    whole: bool = False,
) -> list[Verdict]:
    """Draft and verify once for every row. Rows are not changed; keys and values are written beyond `num_cached`.

    Args:
        whole: as one recording, where the stack has a runner that offers it; its time is then all told as `verify`.
    """
    done = whole_round(stack, cache, rows, plan) if whole and teach is None else None
    if done is not None:
        seconds.lap("verify")
        return [Verdict(one.drafted, one.accepted, one.block, None, None, one.confidences) for one in done]
    last = torch.tensor([row.content[-1] for row in rows], device=stack.device)
    tapped = plan.shadow.layers if plan.shadow is not None else ()
    chooser = None
    if plan.exit_layer is None:
        draft = Draft(last, last, [0] * len(rows))
    elif plan.exit_layer == LOOKUP:
        draft = draft_by_lookup([row.lookup for row in rows], plan.draft_lengths, stack.device)
    else:
        places = [DraftRow(row.pages, len(row.content) - 1, n) for row, n in zip(rows, plan.draft_lengths, strict=True)]
        chooser = Chooser(stack, rows, plan, seconds, noise)
        draft = draft_by_exit(stack, cache, places, last, plan.exit_layer, chooser, tapped)
    start = plan.exit_layer or 0
    spans = [Span(row.pages, len(row.content) - 1, n + 1) for row, n in zip(rows, draft.lengths, strict=True)]
    packed = PackedRows(cache, spans, stack.device)
    seconds.lap("rest" if plan.exit_layer is None else "draft")
    later: Taps | None = dict.fromkeys(layer for layer in tapped if layer > start) if tapped else None
    hidden = stack.run(packed, start, stack.num_layers, draft.hidden, later)
    seconds.lap("verify")
    logits = stack.logits(hidden)
    seconds.lap("head")
    verdicts, picks, scores = _accept(rows, draft, logits, packed.positions[0] + 1, seconds, noise)
    if chooser is not None and plan.reads_confidence:
        verdicts = [v._replace(confidences=tuple(sure)) for v, sure in zip(verdicts, chooser.confidences, strict=True)]
    if chooser is not None and plan.keep_divergence:
        verdicts = _with_divergences(verdicts, chooser, scores)
    taps: list[Tensor] = []
    if plan.shadow is not None:
        seconds.lap("rest")
        seen = [h for h in (later or {}).values() if h is not None]
        taps = [*([] if draft.taps is None else [draft.taps]), *([torch.stack(seen)] if seen else [])]
        verdicts = _with_shadows(stack, rows, plan, verdicts, taps, logits, picks)
        seconds.lap("shadow")
    if teach is not None:
        _hand_on(teach, rows, plan, verdicts, draft.hidden, taps, logits)
    return verdicts


def _hand_on(
    teach: Teach,
    rows: Sequence[Row],
    plan: Plan,
    verdicts: Sequence[Verdict],
    hidden: Tensor,  # [N, hidden_size] after the exit
    taps: Sequence[Tensor],  # as in `_with_shadows`
    logits: Tensor,
) -> None:
    """Lessons from where each row's draft was refused; where no layer drafted, from every row that was looked at.

    Rows with processors give none: what those make of the logits holds for their requests only.
    """
    starts, lessons = _starts(verdicts), []
    for i, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        refused = verdict.accepted < len(verdict.drafted) if plan.exit_layer else bool(taps)
        if refused and not row.request.logits_processor:
            lessons.append(starts[i] + verdict.accepted)
    if not lessons:
        return
    at = torch.tensor(lessons, device=logits.device)
    told = logits[at]
    if plan.exit_layer:
        teach(plan.exit_layer, hidden[at], told)
    layers = plan.shadow.layers if plan.shadow is not None else ()
    for layer, seen in zip(layers, [one for part in taps for one in part], strict=True):
        teach(layer, seen[at], told)


def _starts(verdicts: Sequence[Verdict]) -> list[int]:
    """Where each row's tokens begin in the packed verification."""
    starts = [0]
    for verdict in verdicts:
        starts.append(starts[-1] + len(verdict.drafted) + 1)
    return starts[:-1]


def _with_divergences(verdicts: list[Verdict], chooser: Chooser, logits: Tensor) -> list[Verdict]:
    out = []
    for i, (at, verdict) in enumerate(zip(_starts(verdicts), verdicts, strict=True)):
        judged = min(verdict.accepted + 1, len(verdict.drafted))
        out.append(verdict._replace(divergences=chooser.divergences(i, logits[at : at + judged]) if judged else ()))
    return out


def _with_shadows(
    stack: Stack,
    rows: Sequence[Row],
    plan: Plan,
    verdicts: list[Verdict],
    taps: Sequence[Tensor],  # [some of the plan's layers, N, hidden_size], in order: all of them together
    logits: Tensor,
    picks: Tensor,
) -> list[Verdict]:
    """Look at the judged positions of the rows the plan names; positions beyond a rejection say nothing."""
    assert plan.shadow is not None
    starts, out = _starts(verdicts), list(verdicts)
    index: list[int] = []  # packed positions to look at
    cuts: list[tuple[int, int, int]] = []  # row, and its part of the index
    for i in plan.shadow.rows:
        if rows[i].request.logits_processor:
            continue  # asking a processor about every layer's logits would cost more than it tells
        count = min(verdicts[i].accepted + 1, plan.shadow.max_columns)
        cuts.append((i, len(index), len(index) + count))
        index += range(starts[i], starts[i] + count)
    if not index:
        return out
    at = torch.tensor(index, device=logits.device)
    where = [len(rows[i].content) + column for i, low, high in cuts for column in range(high - low)]
    samplings = [rows[i].request.sampling for i, low, high in cuts for _ in range(high - low)]
    positions = torch.tensor(where, device=logits.device)
    hidden = torch.cat([part[:, at] for part in taps])
    seen = shadow_picks(
        stack, plan.shadow.layers, hidden, samplings, positions, logits[at], picks[at], plan.shadow.exact
    )
    for i, low, high in cuts:
        out[i] = out[i]._replace(shadow=part_of(seen, low, high))
    return out


def _accept(
    rows: Sequence[Row], draft: Draft, logits: Tensor, positions: Tensor, seconds: Seconds, noise: NoiseAhead | None
) -> tuple[list[Verdict], Tensor, Tensor]:
    """The longest prefix of each draft that equals the target's picks, and the pick after it.

    Also all picks `[N]`, and the scores `[N, vocab]` that they were picked from.
    """
    owners = [row for row, n in zip(rows, draft.lengths, strict=True) for _ in range(n + 1)]
    if any(row.request.logits_processor for row in rows):
        fed = draft.tokens.tolist()
        scores = process_packed(rows, draft.lengths, fed, logits)
    else:
        scores = logits
    picks = pick(scores, [row.request.sampling for row in owners], positions, noise)
    fed, chosen = torch.stack([draft.tokens, picks]).tolist()  # the round's one copy to the host
    seconds.lap("pick")
    verdicts, at = [], 0
    for row, drafted in zip(rows, draft.lengths, strict=True):
        guess, own = fed[at + 1 : at + 1 + drafted], chosen[at : at + 1 + drafted]
        accepted = next((i for i, (g, o) in enumerate(zip(guess, own, strict=False)) if g != o), drafted)
        kept = slice(at, at + accepted + 1)
        keep = row.request.keep_logits
        raw = logits[kept].clone() if keep else None
        told = filtered(scores[kept], row.request.sampling).clone() if keep else None
        verdicts.append(Verdict(guess, accepted, own[: accepted + 1], raw, told))
        at += drafted + 1
    return verdicts, picks, scores
