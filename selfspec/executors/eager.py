"""`EagerExecutor`: a round as the papers write it: draft, verify, accept. It serves every model and every plan.

A round without a draft is plain decoding, through the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.control.plan import Plan
from selfspec.control.rows import StageSeconds
from selfspec.drafting.early_exit import Draft, DraftRow, draft_by_exit
from selfspec.drafting.prompt_lookup import given_draft
from selfspec.executors.after_round import Teach, hand_on, with_divergences, with_shadows
from selfspec.executors.draft_picks import DraftPicker
from selfspec.executors.logprobs import token_logprobs
from selfspec.executors.penalties import Penalties, paths_to
from selfspec.executors.picker import Picker
from selfspec.executors.processors import process_packed
from selfspec.executors.program import Executed, Executor, RoundDraft
from selfspec.executors.rows import Row
from selfspec.executors.verdict import Verdict, drawable, walk
from selfspec.kernels.pick import filtered, num_accepted
from selfspec.model.kv_cache import PackedRows, PagedCache, Span, tensor_of
from selfspec.model.stack import Stack, Taps


class EagerExecutor(Executor):
    """Runs every stage as torch operations; layers run as the stack has them, from recordings where it has those.

    Args:
        teach: is handed what exit heads could learn from, see `Teach`.
    """

    def __init__(
        self,
        stack: Stack,
        cache: PagedCache,
        picker: Picker,
        new_seconds: Callable[[], StageSeconds] = StageSeconds,
        teach: Teach | None = None,
    ) -> None:
        super().__init__(stack, cache, picker, new_seconds)
        self._teach = teach

    def serves(self, rows: Sequence[Row], plan: Plan) -> bool:
        return True

    @torch.inference_mode()
    def round(self, rows: Sequence[Row], draft: RoundDraft) -> Executed:
        plan, seconds = draft.plan, self.new_seconds()
        tapped = plan.shadow.layers if plan.shadow is not None else ()
        penalties = Penalties.of(rows, self.stack.vocab_size, self.stack.device)
        drafted, chooser = self._draft(rows, draft, seconds, tapped, penalties)
        start = 0 if drafted.is_unread else plan.exit_layer or 0
        trees = drafted.trees or [None] * len(rows)
        spans = [
            Span(row.pages, len(row.content) - 1, n + 1, tree)
            for row, n, tree in zip(rows, drafted.lengths, trees, strict=True)
        ]
        packed = PackedRows(self.cache, spans, self.stack.device)
        seconds.lap("rest" if plan.exit_layer is None else "draft")
        later: Taps | None = dict.fromkeys(layer for layer in tapped if layer > start) if tapped else None
        hidden = self.stack.run(packed, start, self.stack.num_layers, drafted.hidden, later)
        seconds.lap("verify")
        logits = self.stack.logits(hidden)
        seconds.lap("head")
        positions = [at + 1 for span in spans for at in span.positions()]
        verdicts, scores = self._accept(rows, drafted, logits, positions, penalties)
        seconds.lap("pick")
        if drafted.trees is not None:
            settle(self.cache, rows, verdicts)
        verdicts = draft.with_matches(verdicts)
        if chooser is not None:
            verdicts = _with_chosen(verdicts, chooser, plan, scores)
        taps: list[Tensor] = []
        seconds.lap("rest")
        if plan.shadow is not None:
            seen = [h for h in (later or {}).values() if h is not None]
            taps = [*([] if drafted.taps is None else [drafted.taps]), *([torch.stack(seen)] if seen else [])]
            verdicts = with_shadows(self.stack, self.picker, rows, plan, verdicts, taps, logits, penalties)
            seconds.lap("shadow")
        if self._teach is not None:
            hand_on(self._teach, rows, plan, verdicts, drafted.hidden, taps, logits)
        return Executed(plan.exit_layer if any(drafted.lengths) else None, verdicts, seconds)

    def _draft(
        self,
        rows: Sequence[Row],
        draft: RoundDraft,
        seconds: StageSeconds,
        tapped: Sequence[int],
        penalties: Penalties | None,
    ) -> tuple[Draft, DraftPicker | None]:
        """The round's draft, and who picked its tokens, if a layer drafted."""
        plan, device, ends = draft.plan, self.stack.device, [row.content[-1] for row in rows]
        if draft.given is not None:
            return given_draft(ends, [guess.tokens for guess in draft.given], device), None
        last = tensor_of(ends, device)
        if plan.exit_layer is None:
            return Draft(last, last, [0] * len(rows)), None
        plan = replace(plan, draft_bits=None)  # copies of layers are for compiled code
        places = [DraftRow(row.pages, len(row.content) - 1, n) for row, n in zip(rows, plan.draft_lengths, strict=True)]
        chooser = DraftPicker(self.stack, self.picker, rows, plan, seconds, penalties)
        beside = chooser.branches if plan.second_choices is not None and self.stack.has_trees else None
        exit_layer = plan.exit_layer or 0
        return draft_by_exit(self.stack, self.cache, places, last, exit_layer, chooser, tapped, beside), chooser

    def _accept(
        self,
        rows: Sequence[Row],
        draft: Draft,
        logits: Tensor,
        positions: Sequence[int],
        penalties: Penalties | None,
    ) -> tuple[list[Verdict], Tensor]:
        """The longest prefix of each draft that equals the target's picks, and the pick after it.

        Also the scores `[N, vocab]` that all were picked from.
        """
        owners = [i for i, n in enumerate(draft.lengths) for _ in range(n + 1)]
        scores = _processed(rows, owners, draft, logits, penalties)
        samplings = [rows[i].request.sampling for i in owners]
        picks = self.picker(scores, samplings, positions).tokens
        known = [draft.tokens, picks]
        if any(sampling.temperature > 0 for sampling in samplings):
            known.append(scores.amax(-1).isfinite().long())  # no token can be drawn where all are -inf, or one is NaN
        fed, chosen, *drawn = torch.stack(known).tolist()  # the round's one copy to the host
        verdicts, at = [], 0
        for i, (row, drafted) in enumerate(zip(rows, draft.lengths, strict=True)):
            guess, own = fed[at + 1 : at + 1 + drafted], chosen[at : at + 1 + drafted]
            tree = None if draft.trees is None else draft.trees[i]
            path: Sequence[int]
            if tree is None:
                path = range(num_accepted(guess, own) + 1)
            else:
                path = walk(tree, guess, own)
            if drawn and row.request.sampling.temperature > 0:
                path = drawable(row, path, drawn[0][at : at + 1 + drafted])
            block = [own[node] for node in path]
            kept = slice(at, at + len(path)) if tree is None else [at + node for node in path]
            keep = row.request.keep_logits
            raw = logits[kept].clone() if keep else None
            filtrate = filtered(scores[kept], row.request.sampling).clone() if keep else None
            chain = 0 if draft.chains is None else draft.chains[i]
            asked = row.request.logprobs
            told = None if asked is None else token_logprobs(logits[kept], block, asked)
            verdicts.append(Verdict(guess, path, block, raw, filtrate, tree, chain, logprobs=told))
            at += drafted + 1
        return verdicts, scores


def _processed(
    rows: Sequence[Row], owners: Sequence[int], draft: Draft, logits: Tensor, penalties: Penalties | None
) -> Tensor:
    """Logits `[N, vocab]` after penalties and processors, at every packed token with that token's own prefix."""
    processes = any(row.request.logits_processor for row in rows)
    if penalties is None and not processes:
        return logits
    paths = paths_to(draft.lengths, draft.trees)
    if penalties is not None:
        longest = max(map(len, paths))
        index = penalties.sent([[*path, *[0] * (longest - len(path))] for path in paths])
        logits = penalties.at(owners, draft.tokens[index], [len(path) for path in paths]).applied(logits)
    return process_packed(rows, owners, paths, draft.tokens.tolist(), logits) if processes else logits


def _with_chosen(verdicts: list[Verdict], chooser: DraftPicker, plan: Plan, scores: Tensor) -> list[Verdict]:
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
