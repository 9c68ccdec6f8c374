"""`EagerExecutor`: a round as the papers write it: draft, verify, accept. It serves every model and every plan.

A round without a draft is plain decoding, through the same code.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.core import Plan, RoundOutput, RowRound, Sequence, StageSeconds
from selfspec.drafting.early_exit import DraftRow, PackedDraft, draft_by_exit
from selfspec.executors.accept import num_pickable
from selfspec.executors.after_round import add_divergences, add_shadow_picks
from selfspec.executors.base import Executor, RoundDraft
from selfspec.executors.draft_picks import DraftPicker
from selfspec.executors.final_states import before_each, keep_finals, states_of
from selfspec.executors.logprobs import token_logprobs
from selfspec.executors.masks import mask_of, masked
from selfspec.executors.penalties import Penalties, paths_to
from selfspec.executors.processors import process_packed
from selfspec.kernels.pick import filtered, num_accepted
from selfspec.model.kv_cache import PackedRows, Span, tensor_of
from selfspec.model.split_model import Taps


class EagerExecutor(Executor):
    """Runs every stage as torch operations; layers run as the split model has them."""

    def serves(self, rows: list[Sequence], plan: Plan) -> bool:
        return True

    @torch.inference_mode()
    def round(self, rows: list[Sequence], draft: RoundDraft) -> RoundOutput:
        plan, seconds = draft.plan, self.new_seconds()
        tapped = plan.shadow.layers if plan.shadow is not None else ()
        penalties = Penalties.of(rows, self.split.vocab_size, self.split.device)
        states = states_of(self.split, rows)
        drafted, chooser = self._draft(rows, draft, seconds, tapped, penalties, states)
        start = 0 if drafted.is_unread else plan.exit_layer or 0
        pairs = zip(rows, drafted.lengths, strict=True)
        spans = [Span(row.pages, len(row.token_ids) - 1, n + 1) for row, n in pairs]
        packed = PackedRows(self.cache, spans, self.split.device)
        seconds.lap("rest" if plan.exit_layer is None else "draft")
        later: Taps | None = dict.fromkeys(layer for layer in tapped if layer > start) if tapped else None
        hidden = self.split.run(packed, start, self.split.num_layers, drafted.hidden, later)
        seconds.lap("verify")
        logits = self.split.logits(hidden)
        seconds.lap("head")
        positions = [at + 1 for span in spans for at in span.positions]
        outputs, scores = self.accept(rows, drafted, logits, positions, penalties)
        seconds.lap("pick")
        draft.add_matches(outputs)
        if chooser is not None and plan.reads_confidence:
            for at, (output, confidences) in enumerate(zip(outputs, chooser.confidences, strict=True)):
                output.confidences, output.withdrawn = tuple(confidences), chooser.withdrawn.get(at)
        if chooser is not None and plan.keep_divergence:
            add_divergences(outputs, chooser.logits, scores)
        taps: list[Tensor] = []
        seconds.lap("rest")
        if plan.shadow is not None:
            seen = [h for h in (later or {}).values() if h is not None]
            taps = [*([] if drafted.taps is None else [drafted.taps]), *([torch.stack(seen)] if seen else [])]
            last = before_each(states, hidden, [span.length for span in spans])
            add_shadow_picks(self.split, self.picker, plan.shadow, outputs, taps, logits, penalties, last)
            seconds.lap("shadow")
        if states is not None:
            keep_finals(outputs, hidden, [span.length for span in spans])
        has_drafted = any(drafted.lengths) or (chooser is not None and bool(chooser.withdrawn))
        return RoundOutput(plan.exit_layer if has_drafted else None, outputs, seconds)

    def _draft(
        self,
        rows: list[Sequence],
        draft: RoundDraft,
        seconds: StageSeconds,
        tapped: abc.Sequence[int],
        penalties: Penalties | None,
        states: Tensor | None,
    ) -> tuple[PackedDraft, DraftPicker | None]:
        """The round's draft, and who picked its tokens, if a layer drafted."""
        plan, device, ends = draft.plan, self.split.device, [row.token_ids[-1] for row in rows]
        if draft.given is not None:
            return PackedDraft.given(ends, [one.token_ids for one in draft.given], device), None
        last = tensor_of(ends, device)
        if plan.exit_layer is None:
            return PackedDraft(last, last, [0] * len(rows)), None
        plan = replace(plan, draft_bits=None)  # copies of layers are for compiled code
        starts = [
            DraftRow(row.pages, len(row.token_ids) - 1, n) for row, n in zip(rows, plan.draft_lengths, strict=True)
        ]
        states = None if states is None else states.clone()  # which it changes
        chooser = DraftPicker(self.split, self.picker, rows, plan, seconds, penalties, states)
        exit_layer = plan.exit_layer or 0
        return draft_by_exit(self.split, self.cache, starts, last, exit_layer, chooser, tapped), chooser

    def accept(
        self,
        rows: list[Sequence],
        draft: PackedDraft,
        logits: Tensor,
        positions: abc.Sequence[int],
        penalties: Penalties | None,
    ) -> tuple[list[RowRound], Tensor]:
        """The longest prefix of each draft that equals the target's picks, and the pick after it.

        Also the scores `[N, vocab]` that all were picked from.

        Args:
            draft: the N tokens fed.
            logits: fp32 `[N, vocab]`, the target's, before penalties, processors and masks.
            positions: `[N]`, the index in its row's content of the token to be picked.
            penalties: of the rows; None: none of them has any.
        """
        owners = [i for i, n in enumerate(draft.lengths) for _ in range(n + 1)]
        scores = _processed(rows, owners, draft, logits, penalties)
        params = [rows[i].request.params for i in owners]
        known = [draft.tokens, self.picker(scores, params, positions).tokens]
        if not all(one.is_greedy and not one.processors for one in params):
            largest, greedy = scores.amax(-1), tensor_of([one.is_greedy for one in params], scores.device)
            # No token can be drawn where all are -inf, one is +inf or NaN; the largest is known where none is NaN.
            known.append(torch.where(greedy.bool(), ~largest.isnan(), largest.isfinite()).long())
        fed, picks, *can_pick = torch.stack(known).tolist()  # the round's one copy to the host
        outputs, at = [], 0
        for row, length in zip(rows, draft.lengths, strict=True):
            end = at + 1 + length
            drafted, own = fed[at + 1 : end], picks[at:end]
            accepted = num_accepted(drafted, own)
            if can_pick:
                accepted = num_pickable(row, accepted, can_pick[0][at:end])
            output = RowRound(row, length, accepted, own[: accepted + 1], drafted)
            kept = slice(at, at + accepted + 1)
            if row.request.params.logprobs is not None:
                output.logprobs = token_logprobs(logits[kept], output.token_ids, row.request.params.logprobs)
            if row.request.keep_logits:
                output.logits = logits[kept].clone()
                output.scores = filtered(scores[kept], row.request.params).clone()
            outputs.append(output)
            at = end
        return outputs, scores


def _processed(
    rows: list[Sequence], owners: abc.Sequence[int], draft: PackedDraft, logits: Tensor, penalties: Penalties | None
) -> Tensor:
    """Logits `[N, vocab]` after penalties, processors and masks, at every packed token with that token's own prefix."""
    processes, masks = any(row.has_processors for row in rows), any(row.grammar is not None for row in rows)
    if penalties is None and not processes and not masks:
        return logits
    paths = paths_to(draft.lengths)
    if penalties is not None:
        longest = max(map(len, paths))
        index = penalties.sent([[*path, *[0] * (longest - len(path))] for path in paths])
        logits = penalties.at(owners, draft.tokens[index], [len(path) for path in paths]).applied(logits)
    fed = draft.tokens.tolist() if processes or masks else []
    if processes:
        logits = process_packed(rows, owners, paths, fed, logits)
    if masks:
        each = zip(owners, paths, strict=True)
        logits = masked(logits, [mask_of(rows[i], [fed[at] for at in path]) for i, path in each])
    return logits
