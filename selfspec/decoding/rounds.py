"""One round: draft, verify, accept. A round with no draft is plain decoding, through the same code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.control.plan import Plan
from selfspec.decoding.pick import filtered, pick
from selfspec.decoding.row import Row
from selfspec.drafting.exit import Draft, DraftRow, draft_by_exit
from selfspec.target.cache import PackedRows, PagedCache, Span
from selfspec.target.stack import Stack


@dataclass(slots=True)
class Seconds:
    """Wall time of a round by stage; on CUDA, without a synchronisation, the time to launch it."""

    prefill: float = 0.0
    draft: float = 0.0  # early layers
    verify: float = 0.0  # remaining layers (all layers when nothing is drafted)
    head: float = 0.0  # final norm and vocabulary product
    pick: float = 0.0  # processors, filters, noise, argmax, and the copy to the host
    rest: float = 0.0  # plans, acceptance, stops, text
    _last: float = field(default_factory=perf_counter, repr=False)

    def lap(self, stage: str) -> None:
        now = perf_counter()
        setattr(self, stage, getattr(self, stage) + now - self._last)
        self._last = now

    @property
    def total(self) -> float:
        return self.prefill + self.draft + self.verify + self.head + self.pick + self.rest


class Verdict(NamedTuple):
    """What verification decided for one row."""

    drafted: list[int]
    accepted: int
    block: list[int]  # the accepted drafts and the target's own next token, before any cut
    logits: Tensor | None  # [len(block), vocab] when the row keeps them
    scores: Tensor | None


def decode_round(stack: Stack, cache: PagedCache, rows: Sequence[Row], plan: Plan, seconds: Seconds) -> list[Verdict]:
    """Draft and verify once for every row. Rows are not changed; keys and values are written beyond `num_cached`."""
    last = torch.tensor([row.content[-1] for row in rows], device=stack.device)
    if plan.exit_layer is None:
        draft, start, given = Draft(last, last, [0] * len(rows)), 0, last
    else:
        places = [DraftRow(row.pages, len(row.content) - 1, n) for row, n in zip(rows, plan.draft_lengths, strict=True)]
        chooser = _Chooser(stack, rows, plan, seconds)
        draft = draft_by_exit(stack, cache, places, last, plan.exit_layer, chooser)
        start, given = plan.exit_layer, draft.hidden
    spans = [Span(row.pages, len(row.content) - 1, n + 1) for row, n in zip(rows, draft.lengths, strict=True)]
    packed = PackedRows(cache, spans, stack.device)
    seconds.lap("draft" if start else "rest")
    hidden = stack.run(packed, start, stack.num_layers, given)
    seconds.lap("verify")
    logits = stack.logits(hidden)
    seconds.lap("head")
    return _accept(rows, draft, logits, packed.positions[0] + 1, seconds)


def _accept(rows: Sequence[Row], draft: Draft, logits: Tensor, positions: Tensor, seconds: Seconds) -> list[Verdict]:
    """The longest prefix of each draft that equals the target's picks, and the pick after it."""
    owners = [row for row, n in zip(rows, draft.lengths, strict=True) for _ in range(n + 1)]
    if any(row.request.logits_processor for row in rows):
        fed = draft.tokens.tolist()
        scores = _process_packed(rows, draft.lengths, fed, logits)
    else:
        scores = logits
    picks = pick(scores, [row.request.sampling for row in owners], positions)
    fed, chosen = torch.stack([draft.tokens, picks]).tolist()  # the round's one copy to the host
    seconds.lap("pick")
    verdicts, at = [], 0
    for row, drafted in zip(rows, draft.lengths, strict=True):
        guess, own = fed[at + 1 : at + 1 + drafted], chosen[at : at + 1 + drafted]
        accepted = next((i for i, (g, o) in enumerate(zip(guess, own, strict=False)) if g != o), drafted)
        kept = slice(at, at + accepted + 1)
        keep = row.request.keep_logits
        raw = logits[kept].clone() if keep else None
        final = filtered(scores[kept], row.request.sampling).clone() if keep else None
        verdicts.append(Verdict(guess, accepted, own[: accepted + 1], raw, final))
        at += drafted + 1
    return verdicts


def _process_packed(rows: Sequence[Row], lengths: Sequence[int], fed: list[int], logits: Tensor) -> Tensor:
    """Apply each row's processors at every position, each with its own prefix: the content and the drafts before it."""
    out, at = [], 0
    for row, drafted in zip(rows, lengths, strict=True):
        for j in range(drafted + 1):
            out.append(_process(row, fed[at + 1 : at + 1 + j], logits[at + j]))
        at += drafted + 1
    return torch.stack(out)


def _process(row: Row, drafted: Sequence[int], logits: Tensor) -> Tensor:
    """A row's processors on logits `[vocab]`, after its content and the `drafted` tokens."""
    if not row.request.logits_processor:
        return logits
    ids = torch.tensor([[*row.content, *drafted]], device=logits.device)
    scores = logits[None].clone()
    with row.blamed():
        for process in row.request.logits_processor:
            scores = process(ids, scores)
    return scores[0]


class _Chooser:
    """Picks drafted tokens exactly as the target would, from the exit's logits: same processors, filters and noise."""

    def __init__(self, stack: Stack, rows: Sequence[Row], plan: Plan, seconds: Seconds) -> None:
        self._stack, self._rows, self._plan, self._seconds = stack, rows, plan, seconds
        self._drafted: list[list[int]] = [[] for _ in rows]  # only kept for rows with processors
        self._processes = any(row.request.logits_processor for row in rows)

    def __call__(self, hidden: Tensor, members: list[int], step: int) -> tuple[Tensor, list[int]]:
        self._seconds.lap("draft")
        rows = [self._rows[i] for i in members]
        logits = self._stack.logits(hidden, self._plan.exit_layer)
        self._seconds.lap("head")
        if self._processes:
            pairs = zip(members, logits, strict=True)
            logits = torch.stack([_process(self._rows[i], self._drafted[i], one) for i, one in pairs])
        positions = torch.tensor([len(row.content) + step for row in rows], device=logits.device)
        picks = pick(logits, [row.request.sampling for row in rows], positions)
        if self._processes:
            for i, token in zip(members, picks.tolist(), strict=True):
                self._drafted[i].append(token)
        going = self._confident(logits, picks, members)
        self._seconds.lap("pick")
        return picks, going

    def _confident(self, logits: Tensor, picks: Tensor, members: list[int]) -> list[int]:
        """The rows that go on after this token; the token itself is never withdrawn (it would bias the output)."""
        if self._plan.min_confidence <= 0:
            return members
        sure = logits.softmax(-1).gather(1, picks[:, None])[:, 0] >= self._plan.min_confidence
        return [i for i, on in zip(members, sure.tolist(), strict=True) if on]
