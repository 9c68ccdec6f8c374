"""`DraftPicker`: the picks of a draft, and where each row's draft stops."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.control.plan import confidence_bin
from selfspec.core import Plan, Sequence, StageSeconds
from selfspec.executors.masks import mask_of, masked
from selfspec.executors.penalties import DraftPenalties, Penalties
from selfspec.executors.picker import Picker
from selfspec.executors.processors import process
from selfspec.kernels.pick import Subset
from selfspec.model.split_model import SplitModel


class DraftPicker:
    """Picks drafted tokens as the target would, from the exit's logits: same penalties, masks, filters and noise."""

    def __init__(
        self,
        split: SplitModel,
        picker: Picker,
        rows: list[Sequence],
        plan: Plan,
        seconds: StageSeconds,
        penalties: Penalties | None = None,
        states: Tensor | None = None,
    ) -> None:
        self._last = states  # per row: what the exit's head reads of the token before; see `final_states`
        self._penalties = None if penalties is None else DraftPenalties(penalties)
        self._split, self._picker, self._rows, self._plan, self._seconds = split, picker, rows, plan, seconds
        self._drafted: list[list[int]] = [[] for _ in rows]  # only kept for rows with processors or grammars
        self._processes = any(row.request.params.processors for row in rows)
        self._masks = any(row.grammar is not None for row in rows)
        self._survival = [1.0] * len(rows)
        self.confidences: list[list[float]] = [[] for _ in rows]
        self.withdrawn: dict[int, int] = {}  # by row: the token that it drafted last and does not verify
        self.logits: list[list[Tensor]] = [[] for _ in rows]  # [vocab] per drafted token, where divergences are asked

    def __call__(self, hidden: Tensor, members: list[int], step: int) -> tuple[Tensor, list[int], list[int]]:
        self._seconds.lap("draft")
        rows = [self._rows[i] for i in members]
        logits, tokens = self._logits(hidden, members)
        self._seconds.lap("head")
        if self._penalties is not None:
            penalty = self._penalties.at(members)
            logits = penalty.applied(logits, None if tokens is None else tokens.tokens)
        if self._processes:
            pairs = zip(members, logits, strict=True)
            logits = torch.stack([process(self._rows[i], self._drafted[i], one, one) for i, one in pairs])
        if self._masks:
            masks = [mask_of(self._rows[i], self._drafted[i]) for i in members]
            logits = masked(logits, masks)
        positions = [row.num_tokens + step for row in rows]
        params = [row.request.params for row in rows]
        picks, confidences = self._picker(logits, params, positions, tokens, self._plan.reads_confidence)
        if self._penalties is not None:
            self._penalties.add(picks)
        going = members if confidences is None else self._continuing(confidences.tolist(), members)
        if self._processes or self._masks:
            for i, token in zip(members, picks.tolist(), strict=True):
                self._drafted[i].append(token)
        if self._plan.keep_divergence:
            for i, one in zip(members, logits, strict=True):
                self.logits[i].append(one)
        self._seconds.lap("pick")
        return picks, going, self._withdraw(picks, members, going)

    def _logits(self, hidden: Tensor, members: list[int]) -> tuple[Tensor, Subset | None]:
        """The exit's logits, of the whole vocabulary or of the part of it that the plan drafts over."""
        plan, split = self._plan, self._split
        assert plan.exit_layer is not None
        last = None if self._last is None else self._last[members]
        changed = split.through_heads(hidden[None], (plan.exit_layer,), last)[0]
        if self._last is not None:
            self._last[members] = split.normed(changed)  # in place of the final state, which is not known
        is_whole = self._processes or self._masks or plan.keep_divergence
        part = None if is_whole else split.draft_subset(plan.draft_vocab)
        if part is None:
            return split.head_logits(changed, True), None
        return split.subset_logits(changed, None, part), Subset(part.tokens, split.vocab_size)

    def _continuing(self, confidences: list[float], members: list[int]) -> list[int]:
        """The rows that go on after this token."""
        plan = self._plan
        for i, confidence in zip(members, confidences, strict=True):
            self.confidences[i].append(confidence)
        if plan.stop is not None:
            for i, confidence in zip(members, confidences, strict=True):
                self._survival[i] *= plan.stop.calibration[confidence_bin(confidence)]
            return members if plan.stop.goes_on([self._survival[i] for i in members]) else []
        return [i for i, confidence in zip(members, confidences, strict=True) if confidence >= plan.min_confidence]

    def _withdraw(self, picks: Tensor, members: list[int], going: list[int]) -> list[int]:
        """The rows whose draft ends with this token and that do not verify it."""
        stop, lengths = self._plan.stop, self._plan.draft_lengths
        if stop is None:
            return []
        ended = [i for i in members if i not in going or len(self.confidences[i]) == lengths[i]]
        withdrawn = [i for i in ended if self._survival[i] < stop.keep]
        for i in withdrawn:
            self.withdrawn[i] = int(picks[members.index(i)])
        return withdrawn
