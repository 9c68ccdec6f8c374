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


class WholeRound:
    """The body of a recorded round. It holds the constants that the recording reads.

    Args:
        stack: runs layers (`run_here`) and heads (`logits`).
        cache: the KV cache.
        kernels: attend, pick and accept.
        inputs: the input buffers.
    """

    def __init__(self, stack: Any, cache: PagedCache, kernels: Kernels, inputs: RoundInputs) -> None:
        self.stack, self.cache, self.kernels, self.inputs, self.key = stack, cache, kernels, inputs, inputs.key
        device = inputs.rows.device
        self._slots = torch.arange(self.key.slots, device=device)
        self._places = torch.arange(self.key.width, device=device)
        edges = torch.tensor(CONFIDENCE_EDGES, dtype=torch.float64)
        self._edges = edges.to(device)

    def __call__(self) -> tuple[Tensor, ...]:
        """Run a round, and turn the inputs into those of the next round.

        Returns the record, int64 `[slots, fields]`: `Accepted.record`, then the bits of confidences.
        """
        key = self.key
        fields = dict(zip(FIELDS, self.inputs.rows.unbind(1), strict=False))
        fields |= {name: fields[name].int().view(torch.float32) for name in ("temperature", "top_p", "min_p")}
        fields["drafts"] = torch.minimum(fields["drafts"], fields["room"] - 1)
        live = fields["content"] > 0
        sure = torch.zeros((key.slots, key.width - 1), dtype=torch.float32, device=live.device)
        if key.exit_layer:
            fed, hidden, counts = self._draft(fields, live, sure)
        else:
            fed = torch.cat([fields["last"][:, None], self.inputs.rows[:, -key.width : -1]], 1)
            counts, hidden = (fields["drafts"] + 1) * live, fed.flatten()
        content = fields["content"]
        used = self._places < counts[:, None]
        positions = content[:, None] - 1 + self._places
        rows = self._rows(positions, used, counts, content - 1 + counts)
        last = self.stack.run_here(rows, key.exit_layer, self.stack.num_layers, hidden)
        picks, _ = self.kernels.pick(self.stack.logits(last), self._sampling(fields, positions + 1))
        eos = self.inputs.rows[:, len(FIELDS) : len(FIELDS) + key.most_eos].contiguous()
        done = self.kernels.accept(
            fed.flatten(), picks, rows.layout.starts, rows.layout.counts, fields["room"].int(), eos, key.width
        )
        self.kernels.advance(self.inputs.rows, done.num_kept, done.ended, done.last)
        return (torch.cat((done.record, sure.view(torch.int32).long()), 1),)

    def _draft(self, fields: dict[str, Tensor], live: Tensor, sure: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draft, and write confidences to `sure`, fp32 `[slots, width - 1]`.

        Returns the tokens fed, int64 `[slots, width]`; hidden states after the exit layer, `[slots * width, size]`; and
        the number of tokens fed per row, `[slots]`. As in `selfspec.drafting.early_exit`, a row that stops still feeds
        the token that it has just drafted.
        """
        key, token, going = self.key, fields["last"], live
        wanted, survival = fields["drafts"], torch.ones(key.slots, dtype=torch.float64, device=live.device)
        fed, hidden = [], []
        counts = torch.zeros_like(wanted)
        for step in range(key.width):
            content = fields["content"] + step
            rows = self._rows(content[:, None] - 1, going[:, None], going.long(), content * going)
            state = self.stack.run_here(rows, 0, key.exit_layer, token)
            fed.append(token)
            hidden.append(state)
            counts = counts + going
            if step == key.width - 1:
                break
            going = going & (wanted > step)
            logits = self.stack.logits(state, key.exit_layer)
            picks, confidence = self.kernels.pick(logits, self._sampling(fields, content[:, None]))
            token = torch.where(going, picks, token)
            sure[:, step] = confidence
            if key.stop != "none":
                continues, survival = self._continues(confidence.double(), going, survival)
                wanted = torch.where(going & ~continues, step + 1, wanted)
        states = torch.stack(hidden, 1)
        return torch.stack(fed, 1), states.flatten(0, 1), counts

    def _continues(self, sure: Tensor, going: Tensor, survival: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows draft one more token, bool `[slots]`, and the rows' survival; see `SurvivalStop`."""
        stops = self.inputs.stops
        if self.key.stop == "confidence":
            return sure >= stops[0], survival
        bins = torch.bucketize(sure, self._edges, right=True)
        survival = torch.where(going, survival * stops[2:][bins], survival)
        enough = torch.where(going, survival, 0).sum() >= stops[1] * going.sum()
        return enough.expand_as(going), survival

    def _rows(self, positions: Tensor, used: Tensor, counts: Tensor, lengths: Tensor) -> StaticRows:
        """The rows of a call with n places per slot. `positions` and `used`: `[slots, n]`."""
        key, size, n = self.key, self.cache.page_size, positions.shape[1]
        positions = torch.where(used, positions, 0)
        pages = self.inputs.pages.gather(1, positions // size).long()
        slots = torch.where(used, pages * size + positions % size, -1)
        owners = torch.where(used, self._slots[:, None], -1)
        layout = Layout(
            (self._slots * n).int(), counts.int(), (lengths * (counts > 0)).int(), self.inputs.pages,
            owners.flatten().int(), slots.flatten(), positions.flatten(), n, key.most_tokens,
        )  # fmt: skip
        return StaticRows(self.cache, layout, self.kernels)

    def _sampling(self, fields: dict[str, Tensor], positions: Tensor) -> SamplingTensors:
        """The sampling of `slots * n` picks at `positions`, `[slots, n]`: the n places of a slot share theirs."""
        n = positions.shape[1]
        # `contiguous`: for one slot or one place, `flatten` returns a view with strides that the kernel does not read.
        each = {name: fields[name][:, None].expand(-1, n).flatten().contiguous() for name in FIELDS[4:]}
        return SamplingTensors(
            each["temperature"], each["top_k"].int(), each["top_p"], each["min_p"], each["seed"], positions.flatten(),
            self.key.sampled, self.key.filtered,
        )  # fmt: skip
