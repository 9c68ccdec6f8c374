"""One round, from drafting to acceptance, as one recording that never waits for the host.

Every row has `width` places: one for its last token and one per drafted token, used or not. Drafts stop by masks, not
by control flow. One upload writes the rows, and one copy to the host returns the results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.control.plan import CONFIDENCE_EDGES
from selfspec.executors.cuda.round_inputs import FIELDS, RoundInputs
from selfspec.executors.cuda.static_rows import StaticRows
from selfspec.kernels.layout import Layout, SamplingTensors
from selfspec.kernels.suite import Kernels
from selfspec.model.kv_cache import PagedCache

Fields = dict[str, Tensor]  # the columns of `RoundInputs.rows`, `[slots]` each


class WholeRound:
    """The body of a recorded round. It holds the constants that the recording reads.

    Args:
        split: runs layers (`run_here`) and heads (`logits`, `subset_logits`).
        cache: the KV cache.
        kernels: attend, pick, accept and advance.
        inputs: the input buffers.
    """

    def __init__(self, split: Any, cache: PagedCache, kernels: Kernels, inputs: RoundInputs) -> None:
        self.split, self.cache, self.kernels, self.inputs, self.key = split, cache, kernels, inputs, inputs.key
        device = inputs.rows.device
        self._slots = torch.arange(self.key.slots, device=device)
        self._places = torch.arange(self.key.width, device=device)
        self._edges = torch.tensor(CONFIDENCE_EDGES, dtype=torch.float64).to(device)

    def __call__(self) -> tuple[Tensor, ...]:
        """Run a round, and turn the inputs into those of the next round.

        Returns the record, int64 `[slots, fields]`; see `round_inputs.read_record`.
        """
        key = self.key
        fields = dict(zip(FIELDS, self.inputs.rows.unbind(1), strict=False))
        fields |= {name: fields[name].int().view(torch.float32) for name in ("temperature", "top_p", "min_p")}
        fields["drafts"] = torch.minimum(fields["drafts"], fields["remaining"] - 1)
        live, content = fields["content"] > 0, fields["content"]
        confidences = torch.zeros((key.slots, key.width - 1), dtype=torch.float32, device=live.device)
        if key.exit_layer:
            tokens, hidden, counts = self._draft(fields, live, confidences)
        else:
            tokens = torch.cat([fields["last"][:, None], self.inputs.rows[:, -key.width : -1]], 1).flatten()
            hidden, counts = tokens, (fields["drafts"] + 1) * live
        positions = content[:, None] - 1 + self._places
        rows = self._rows(positions, self._places < counts[:, None], counts, content - 1 + counts)
        last = self.split.run_here(rows, key.exit_layer, self.split.num_layers, hidden)
        picks, _ = self.kernels.pick(self.split.logits(last), self._sampling(fields, positions + 1))
        eos = self.inputs.rows[:, len(FIELDS) : len(FIELDS) + key.most_eos].contiguous()
        layout, remaining = rows.layout, fields["remaining"].int()
        done = self.kernels.accept(tokens, picks, layout.starts, layout.counts, remaining, eos, key.width)
        self.kernels.advance(self.inputs.rows, done.num_kept, done.ended, done.last)
        return (torch.cat((done.record, confidences.view(torch.int32).long()), 1),)

    def _draft(self, fields: Fields, live: Tensor, confidences: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draft, and write `confidences`, fp32 `[slots, width - 1]`.

        As in `selfspec.drafting.early_exit`, a row that stops still feeds the token that it has just drafted.

        Returns:
            Tokens to verify, int64 `[slots * width]`; their hidden states `[slots * width, hidden_size]` after the exit
            layer; and how many tokens of each row are used, int64 `[slots]`.
        """
        key, token, going = self.key, fields["last"], live
        wanted, survival = fields["drafts"], torch.ones(key.slots, dtype=torch.float64, device=live.device)
        fed, hidden = list[Tensor](), list[Tensor]()
        counts = torch.zeros_like(wanted)
        for step in range(key.width):
            hidden.append(self._feed(fields, step, going, token))
            fed.append(token)
            counts = counts + going
            if step == key.width - 1:
                break
            going = going & (wanted > step)
            picks, confidences[:, step] = self._pick_draft(fields, step, hidden[-1])
            token = torch.where(going, picks, token)
            if key.stop != "none":
                continues, survival = self._continues(confidences[:, step].double(), going, survival)
                wanted = torch.where(going & ~continues, step + 1, wanted)
        return torch.stack(fed, 1).flatten(), torch.stack(hidden, 1).flatten(0, 1), counts

    def _feed(self, fields: Fields, step: int, going: Tensor, token: Tensor) -> Tensor:
        """Run one token of each row that is going through the early layers; `[slots, hidden_size]`."""
        content = fields["content"] + step
        rows = self._rows(content[:, None] - 1, going[:, None], going.long(), content * going)
        state: Tensor = self.split.run_here(rows, 0, self.key.exit_layer, token)
        return state

    def _pick_draft(self, fields: Fields, step: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' next tokens, int64 `[slots]`, and confidences, fp32 `[slots]`."""
        key, part = self.key, self.inputs.part
        sampling = self._sampling(fields, (fields["content"] + step)[:, None])
        if part is None:
            return self.kernels.pick(self.split.logits(state, key.exit_layer), sampling)
        logits = self.split.subset_logits(state, key.exit_layer, part)
        return self.kernels.pick(logits, sampling, names=part.tokens)

    def _continues(self, confidence: Tensor, going: Tensor, survival: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows draft one more token, bool `[slots]`, and the rows' survival; see `SurvivalStop`."""
        stops = self.inputs.stops
        if self.key.stop == "confidence":
            return confidence >= stops[0], survival
        bins = torch.bucketize(confidence, self._edges, right=True)
        survival = torch.where(going, survival * stops[2:][bins], survival)
        enough = torch.where(going, survival, 0).sum() >= stops[1] * going.sum()
        return enough.expand_as(going), survival

    def _slots_of(self, positions: Tensor, used: Tensor) -> Tensor:
        """The cache slots of tokens at `positions` of each row, int64 `[slots, n]`; -1 where they are not used."""
        size = self.cache.page_size
        positions = torch.where(used, positions, 0)
        pages = self.inputs.pages.gather(1, positions // size).long()
        return torch.where(used, pages * size + positions % size, -1)

    def _rows(self, positions: Tensor, used: Tensor, counts: Tensor, lengths: Tensor) -> StaticRows:
        """The rows of a call with n places per slot.

        Args:
            positions: int64 `[slots, n]`.
            used: bool `[slots, n]`.
            counts: `[slots]`, used places.
            lengths: `[slots]`, tokens that the row then holds.
        """
        n = positions.shape[1]
        slots = self._slots_of(positions, used)
        owners = torch.where(used, self._slots[:, None], -1)
        layout = Layout(
            (self._slots * n).int(), counts.int(), (lengths * (counts > 0)).int(), self.inputs.pages,
            owners.flatten().int(), slots.flatten(), torch.where(used, positions, 0).flatten(), n, self.key.most_tokens,
        )  # fmt: skip
        return StaticRows(self.cache, layout, self.kernels)

    def _sampling(self, fields: Fields, positions: Tensor) -> SamplingTensors:
        """The sampling of `slots * n` picks at `positions`, `[slots, n]`: the n places of a slot share theirs."""
        n = positions.shape[1]
        # `contiguous`: for one slot or one place, `flatten` returns a view with strides that the kernel does not read.
        each = {name: fields[name][:, None].expand(-1, n).flatten().contiguous() for name in FIELDS[4:]}
        return SamplingTensors(
            each["temperature"], each["top_k"].int(), each["top_p"], each["min_p"], each["seed"], positions.flatten(),
            self.key.sampled, self.key.filtered,
        )  # fmt: skip
