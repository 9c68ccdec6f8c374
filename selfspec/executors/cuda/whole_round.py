"""One round, from drafting to acceptance, as one recording that never waits for the host.

Every row has `width` places: one for its last token and one per drafted token, used or not. One upload writes the rows,
one launch makes of them what all calls of the round read, and one copy to the host returns the results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.executors.cuda.round_inputs import RoundInputs
from selfspec.executors.cuda.static_rows import StaticRows
from selfspec.kernels.layout import EOS, GIVEN, Layout, Prepared, Step
from selfspec.kernels.suite import Kernels
from selfspec.model.kv_cache import PagedCache


class WholeRound:
    """The body of a recorded round.

    Args:
        split: runs layers (`run_here`) and heads (`logits`, `subset_logits`).
        cache: the KV cache.
        kernels: attend, pick, prepare, accept and advance.
        inputs: the input buffers.
    """

    def __init__(self, split: Any, cache: PagedCache, kernels: Kernels, inputs: RoundInputs) -> None:
        self.split, self.cache, self.kernels, self.inputs, self.key = split, cache, kernels, inputs, inputs.key

    def __call__(self) -> tuple[Tensor, ...]:
        """Run a round, and turn the inputs into those of the next round.

        Returns the record, int64 `[slots, fields]`, see `round_inputs.read_record`; and the last hidden states at all
        places, `[slots * width, hidden_size]`.
        """
        key, state, drafts = self.key, self.inputs.rows, self.key.exit_layer > 0
        given = self.kernels.prepare(state, self.inputs.pages, self.cache.page_size, key.width, key.most_tokens, drafts)
        tokens, hidden, confidences = self._draft(given) if drafts else (given.fed, given.fed, None)
        rows, layout = self._rows(given.verify.layout), given.verify.layout
        last = self.split.run_here(rows, key.exit_layer, self.split.num_layers, hidden)
        picks, _ = self.kernels.pick(self.split.logits(last), given.verify.sampling)
        eos = state[:, EOS:GIVEN]
        done = self.kernels.accept(tokens, picks, layout.starts, layout.counts, given.remaining, eos, key.width)
        self.kernels.advance(state, done.num_kept, done.ended, done.last)
        if confidences is None:
            return done.record, last
        return torch.cat((done.record, confidences.view(torch.int32).long()), 1), last

    def _draft(self, given: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        """Draft as many tokens as the row that drafts the most: of others, what follows is not used.

        As in `selfspec.drafting.early_exit`, a row's last drafted token is fed, too.

        Returns:
            Tokens to verify, int64 `[slots * width]`; their hidden states `[slots * width, hidden_size]` after the exit
            layer; and confidences of the drafted ones, fp32 `[slots, width - 1]`.
        """
        token, fed, hidden, sure = given.fed[:: self.key.width], list[Tensor](), list[Tensor](), list[Tensor]()
        for step in given.drafts:
            fed.append(token)
            hidden.append(self.split.run_here(self._rows(step.layout), 0, self.key.exit_layer, token))
            if len(fed) < self.key.width:
                token, confidence = self._pick_draft(step, hidden[-1])
                sure.append(confidence)
        return torch.stack(fed, 1).flatten(), torch.stack(hidden, 1).flatten(0, 1), torch.stack(sure, 1)

    def _pick_draft(self, step: Step, state: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' next tokens, int64 `[slots]`, and confidences, fp32 `[slots]`."""
        part = self.inputs.part
        if part is None:
            return self.kernels.pick(self.split.logits(state, self.key.exit_layer), step.sampling)
        logits = self.split.subset_logits(state, self.key.exit_layer, part)
        return self.kernels.pick(logits, step.sampling, names=part.tokens)

    def _rows(self, layout: Layout) -> StaticRows:
        return StaticRows(self.cache, layout, self.kernels)
