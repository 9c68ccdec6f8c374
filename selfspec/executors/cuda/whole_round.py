"""One round, from drafting to acceptance, as one recording that never waits for the host.

Every row has `width` places: one for its last token and one per drafted token, used or not. Drafts stop by masks, not
by control flow. One upload writes the rows, and one copy to the host returns the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.control.plan import CONFIDENCE_EDGES, NUM_BINS, SurvivalStop
from selfspec.executors.cuda.static_rows import StaticRows, fill_pages, upload
from selfspec.kernels.layout import Layout, SamplingTensors
from selfspec.kernels.suite import Kernels
from selfspec.model.kv_cache import PagedCache

FIELDS = ("last", "content", "drafts", "room", "seed", "top_k", "temperature", "top_p", "min_p")


class RoundRow(NamedTuple):
    """The input of a round for one row."""

    pages: Sequence[int]
    content: int  # number of tokens that it holds; the last one has no keys and values yet
    last: int  # its last token
    room: int  # tokens that it may still emit
    eos: Sequence[int]  # tokens that end it
    drafts: int  # maximum number of tokens to draft, or the number of given ones
    given: Sequence[int]  # drafted tokens, if no layer drafts
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class RoundKey(NamedTuple):
    """What determines the operations and sizes of a recorded round."""

    exit_layer: int  # number of layers that draft; 0: drafts are given, or there are none
    width: int  # places per row: maximum drafted tokens + 1
    slots: int  # maximum rows
    most_tokens: int  # maximum tokens held per row
    most_eos: int  # maximum number of tokens that end a row
    sampled: bool  # whether a row has a temperature above 0
    filtered: bool  # whether a row has top_k, top_p or min_p
    stop: str  # the stop rule: "none", "confidence", "survival"
    confident: bool  # whether confidences are reported


class RowRound(NamedTuple):
    """The result of a round for one row."""

    drafted: list[int]
    accepted: int  # number of accepted drafted tokens
    block: list[int]  # accepted drafted tokens and the target's next token, before any cut
    kept: int  # tokens of the block up to the one that ends the row, at most the row's room
    confidences: tuple[float, ...]  # of drafted tokens; empty if not reported


class RoundInputs:
    """The input buffers of one recorded round."""

    def __init__(self, key: RoundKey, cache: PagedCache, device: torch.device) -> None:
        self.key, self._tables = key, ((-1,),)
        columns = len(FIELDS) + key.most_eos + key.width
        self.rows = torch.zeros((key.slots, columns), dtype=torch.int64, device=device)
        self.stops = torch.zeros(2 + NUM_BINS, dtype=torch.float64, device=device)
        self.pages = torch.zeros((key.slots, cache.pages_for(key.most_tokens)), dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory of the buffers."""
        return sum(one.nbytes for one in (self.rows, self.stops, self.pages))

    def fill(self, rows: Sequence[RoundRow], min_confidence: float, stop: SurvivalStop | None) -> None:
        """Write a round into the buffers. Unused slots become empty."""
        key, lines = self.key, []
        numbers = [[row.temperature, row.top_p, row.min_p] for row in rows]
        floats = torch.tensor(numbers, dtype=torch.float32).view(torch.int32).tolist()
        for row, (temperature, top_p, min_p) in zip(rows, floats, strict=True):
            ids = [*row.eos, *[-1] * (key.most_eos - len(row.eos))]
            given = [*row.given, *[0] * (key.width - len(row.given))]
            one = [row.last, row.content, row.drafts, row.room, row.seed, row.top_k, temperature, top_p, min_p]
            lines.append([*one, *ids, *given])
        empty = [0] * self.rows.shape[1]
        upload(self.rows, lines + [empty] * (key.slots - len(rows)))
        if key.stop != "none":
            upload(self.stops, [min_confidence, *((stop.least, *stop.calibration) if stop else [0.0] * (NUM_BINS + 1))])
        fill_pages(self.pages, self, tuple(tuple(row.pages) for row in rows))


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
        """Run a round. Returns the record, int64 `[slots, fields]`: `Accepted.record`, then the bits of confidences."""
        key = self.key
        fields = dict(zip(FIELDS, self.inputs.rows.unbind(1), strict=False))
        fields |= {name: fields[name].int().view(torch.float32) for name in ("temperature", "top_p", "min_p")}
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


def read_record(record: Tensor, rows: Sequence[RoundRow], key: RoundKey) -> list[RowRound]:
    """The results of all rows, from the record on the host."""
    width, results = key.width, list[RowRound]()
    whole, sure = record[: len(rows)].split([3 + 2 * width, width - 1], 1)
    for line, confidences in zip(whole.tolist(), sure.int().view(torch.float32).tolist(), strict=True):
        drafted, accepted, kept = line[:3]
        block = line[3 + width : 4 + width + accepted]
        reported = tuple(confidences[:drafted]) if key.confident else ()
        results.append(RowRound(line[3 : 3 + drafted], accepted, block, kept, reported))
    return results
