"""A round on a device as one recording, from drafting to acceptance: what it reads, does and returns.

A recording is made for a `RoundKey`, to which rows and draft lengths are rounded up, so that few recordings serve all
calls. Every row has `width` places: one for its last token and one per drafted token, used or not. One upload writes
the rows (`RoundInputs`), one launch makes of them what all calls of the round read, and one copy to the host returns
the results (`read_record`). A round (`WholeRound`) ends by turning its rows into those of the next one, so that
`RecordedRounds` are launched without waiting for their results.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from selfspec.executors.cuda.capture import Recording
from selfspec.kernels.layout import GIVEN, MOST_EOS, Layout, Step
from selfspec.kernels.suite import Kernels
from selfspec.model.attention import Reach
from selfspec.model.draft_vocabulary import HeldSubset
from selfspec.model.kv_cache import PackedRows, PagedCache, tensor_of

MAX_IN_FLIGHT = 2  # rounds: the host reads the record of one while the device runs the next
MAX_WIDTH = 16  # tokens per row: the last one and the drafted ones
MAX_ROWS = 32  # rows of a round that drafts; others have up to `SLOTS[-1]`
MAX_PLACES = 256  # tokens of a round, which computes all of them, used or not
SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTHS = (1, 2, 4, 8, MAX_WIDTH)  # of rounds that no layer drafts
LEAST_HELD, HELD_FACTOR = 4096, 4  # smallest capacity per row in tokens; each larger one over the one before
NUMPY = {torch.int32: np.int32, torch.int64: np.int64}

# ------------------------------------------------------------------------------------------------- what a round reads


class RoundRow(NamedTuple):
    """The input of a round for one row."""

    pages: Sequence[int]
    content: int  # number of tokens that it holds; the last one has no keys and values yet
    last: int  # its last token
    remaining: int  # tokens that it may still emit
    eos: Sequence[int]  # tokens that end it; the device knows the first `MOST_EOS` of them
    drafts: int  # maximum number of tokens to draft, or the number of given ones; below `remaining` on the device
    given: Sequence[int]  # drafted tokens, if no layer drafts
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class RoundKey(NamedTuple):
    """What determines the operations and sizes of a recorded round; nothing in it but lengths depends on requests."""

    exit_layer: int  # number of layers that draft; 0: drafts are given, or there are none
    width: int  # places per row: maximum drafted tokens + 1
    slots: int  # maximum rows
    most_tokens: int  # maximum tokens held per row
    has_states: bool = False  # whether the hidden states after every layer are returned; those of width 1 are always
    vocab: int = 0  # size of the part of the vocabulary that is drafted over; 0: all of it


def round_up(value: int, steps: Sequence[int]) -> int | None:
    """The smallest of the ascending `steps` that is at least `value`; None if there is none."""
    at = bisect_left(steps, value)
    return steps[at] if at < len(steps) else None


def token_capacity(most_tokens: int, limit: int) -> int:
    """The capacity per row in tokens, for rows of at most `most_tokens` in a cache that holds `limit` tokens in all."""
    capacity = LEAST_HELD
    while capacity < most_tokens:
        capacity *= HELD_FACTOR
    return min(limit, capacity)


class RoundInputs:
    """The input buffers of one recorded round, and the buffers on the host for its results.

    The rows are empty slots until they are filled. A round changes them into the rows of the next round.
    """

    def __init__(
        self,
        key: RoundKey,
        cache: PagedCache,
        device: torch.device,
        part: HeldSubset | None = None,
        finals: Tensor | None = None,
    ) -> None:
        self.key, self.part, self.records = key, part, HostRecords(device)
        self.finals = finals
        """`[slots, hidden_size]`, final states of the tokens before the last ones; None: there are no exit heads."""
        self._tables: Sequence[Sequence[int]] = ()
        self.rows = torch.zeros((key.slots, GIVEN + key.width), dtype=torch.int64, device=device)
        self.pages = torch.zeros((key.slots, cache.pages_for(key.most_tokens)), dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory of the buffers."""
        return sum(one.nbytes for one in (self.rows, self.pages, self.finals) if one is not None)

    @property
    def shared(self) -> tuple[HeldSubset, ...]:
        """Buffers that other recordings read, too."""
        return () if self.part is None else (self.part,)

    def fill(self, rows: Sequence[RoundRow], finals: Tensor | None = None) -> None:
        """Write a round into the buffers. Unused slots become empty. `finals`: those of the rows; None: zeros.

        Page tables are written where they are others than the last ones. They are compared without looking into those
        that are the same objects, so they must not be lists that are changed in place.
        """
        key, lines = self.key, []
        numbers = [[row.temperature, row.top_p, row.min_p] for row in rows]
        floats = np.array(numbers, np.float32).view(np.int32).tolist()
        for row, (temperature, top_p, min_p) in zip(rows, floats, strict=True):
            ids = [*row.eos[:MOST_EOS], *[-1] * (MOST_EOS - len(row.eos))]
            given = [*row.given, *[0] * (key.width - len(row.given))]
            one = [row.last, row.content, row.remaining, row.drafts, row.seed, row.top_k, temperature, top_p, min_p]
            lines.append([*one, *ids, *given])
        upload(self.rows, lines)
        tables = [row.pages for row in rows]
        if self._tables != tables:
            width = self.pages.shape[1]  # pages beyond it are left out
            upload(self.pages, [[*table[:width], *[0] * (width - len(table))] for table in tables])
            self._tables = tables
        if self.finals is not None:
            if finals is None:
                self.finals.zero_()
            else:
                self.finals[: len(rows)] = finals


def upload(buffer: Tensor, lines: Sequence[Sequence[int]]) -> None:
    """Write the first lines of a buffer from the host, and zeros to the others, without waiting for the device.

    Every upload has pinned memory of its own, which torch gives out again after the copy.
    """
    empty = [[0] * buffer.shape[1]] * (len(buffer) - len(lines))
    source = torch.from_numpy(np.array([*lines, *empty], NUMPY[buffer.dtype]))
    buffer.copy_(source.pin_memory() if buffer.is_cuda else source, non_blocking=True)


# -------------------------------------------------------------------------------------------------- what a round does


class WholeRound:
    """The body of a recorded round.

    Args:
        split: runs layers (`run`) and heads (`logits`, `subset_logits`).
        cache: the KV cache.
        kernels: attend, pick, prepare and accept.
        inputs: the input buffers.
    """

    def __init__(self, split: Any, cache: PagedCache, kernels: Kernels, inputs: RoundInputs) -> None:
        self.split, self.cache, self.kernels, self.inputs, self.key = split, cache, kernels, inputs, inputs.key

    def __call__(self) -> tuple[Tensor, ...]:
        """Run a round, and turn the inputs into those of the next round.

        Returns:
            the record, int64 `[slots, fields]`, see `read_record`; the last hidden states at all places,
            `[slots * width, hidden_size]`; and where the key says so, those after 1, 2, .. layers.
        """
        key, state, drafts = self.key, self.inputs.rows, self.key.exit_layer > 0
        given = self.kernels.prepare(state, self.inputs.pages, self.cache.page_size, key.width, key.most_tokens, drafts)
        layout, tokens, hidden = given.verify.layout, given.fed, given.fed
        states, confidences = list[Tensor](), list[Tensor]()
        if drafts:
            tokens, states, confidences = self._draft(given.fed[:: key.width], given.drafts)
            hidden = states[-1]
        *later, last = self._layers(layout, key.exit_layer, self.split.num_layers, hidden)
        picks, _ = self.kernels.pick(self.split.logits(last), given.verify.sampling)
        done = self.kernels.accept(state, tokens, picks, layout.starts, layout.counts, key.width)
        finals = self.inputs.finals
        if finals is not None:
            place = (done.num_kept.long() - 1).clamp(min=0)[:, None, None].expand(-1, 1, finals.shape[1])
            finals.copy_(last.unflatten(0, (-1, key.width)).gather(1, place)[:, 0])
        record = done.record
        if confidences:
            record = torch.cat((record, torch.stack(confidences, 1).view(torch.int32).long()), 1)
        return (record, last, *states, *later) if key.has_states else (record, last)

    def _draft(self, token: Tensor, steps: Sequence[Step]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Draft as many tokens as the row that drafts the most: of others, what follows is not used.

        As in `selfspec.drafting.early_exit`, a row's last drafted token is fed, too.

        Returns:
            tokens to verify, int64 `[slots * width]`; their hidden states `[slots * width, hidden_size]`, the last ones
            after the exit layer; and by draft step, confidences of the drafted tokens, fp32 `[slots]`.
        """
        fed, states, confidences, final = list[Tensor](), list[list[Tensor]](), list[Tensor](), self.inputs.finals
        for step in steps:
            fed.append(token)
            states.append(self._layers(step.layout, 0, self.key.exit_layer, token))
            if len(fed) < self.key.width:
                changed = self.split.through_heads(states[-1][-1][None], (self.key.exit_layer,), final)[0]
                if final is not None:
                    final = self.split.normed(changed)  # in place of the final state, which is not known
                token, confidence = self._pick_draft(step, changed)
                confidences.append(confidence)
        by_layer = [torch.stack(one, 1).flatten(0, 1) for one in zip(*states, strict=True)]
        return torch.stack(fed, 1).flatten(), by_layer, confidences

    def _layers(self, layout: Layout, start: int, stop: int, given: Tensor) -> list[Tensor]:
        """Run layers [start, stop); the hidden states after all of them, before these those after each, if wanted."""
        taps: dict[int, Any] = dict.fromkeys(range(start + 1, stop)) if self.key.has_states else {}
        hidden = self.split.run(StaticRows(self.cache, layout, self.kernels), start, stop, given, taps or None)
        return [*taps.values(), hidden]

    def _pick_draft(self, step: Step, state: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' next tokens, int64 `[slots]`, and confidences, fp32 `[slots]`. `state`: after the exit's head."""
        part = self.inputs.part
        if part is None:
            return self.kernels.pick(self.split.head_logits(state, True), step.sampling)
        logits = self.split.subset_logits(state, None, part)
        return self.kernels.pick(logits, step.sampling, names=part.tokens)


class StaticRows(PackedRows):
    """`PackedRows` for use inside a recording: its description lies in the tensors of a layout, not on the host.

    It must not be part of a reference cycle: dropping a recording must free the memory of its tensors at once.
    """

    is_static = True

    def __init__(self, cache: PagedCache, layout: Layout, kernels: Kernels) -> None:
        self.cache, self.layout, self._kernels = cache, layout, kernels
        self.spans, self.device = (), layout.positions.device
        self.positions = layout.positions[None]
        self.plans = {}

    @property
    def num_tokens(self) -> int:
        """The number of places for tokens, padding included."""
        return self.layout.positions.shape[0]

    def write(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values, and return the layer's pages; see `PackedRows.write`."""
        keys, values = self.cache.layer(layer_idx, key, value)
        self._kernels.scatter(key, value, keys, values, self.layout.slots)
        return keys, values

    def attend(
        self,
        rows: Any,
        queries: Tensor,  # [heads, N, head_dim]
        keys: Tensor,
        values: Tensor,
        reach: Reach,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of the new tokens; see `selfspec.kernels.paged_attention.attend`."""
        given = (queries.transpose(0, 1), keys, values, self.layout, scale, *reach, softcap, sinks)
        return self._kernels.attend(*given)


# ----------------------------------------------------------------------------------------------- what a round returns


class RowResult(NamedTuple):
    """The result of a round for one row."""

    drafted: list[int]
    accepted: int  # number of accepted drafted tokens
    block: list[int]  # accepted drafted tokens and the target's next token, before any cut; empty if it ended before
    kept: int  # tokens of the block up to the one that ends the row, at most the row's remaining ones
    confidences: tuple[float, ...]  # of drafted tokens; empty if not reported


def read_record(record: Tensor, num_rows: int, key: RoundKey, reports_confidence: bool) -> list[RowResult]:
    """The results of all rows, from the record on the host: `Accepted.record`, and the bits of confidences."""
    width, results = key.width, list[RowResult]()
    whole = record[:num_rows].numpy()
    bits = whole[:, 3 + 2 * width : 2 + 3 * width]
    confidences = bits.astype(np.int32).view(np.float32).tolist() if reports_confidence else None
    for at, line in enumerate(whole.tolist()):
        length, accepted, kept = line[:3]
        block = line[3 + width : 4 + width + accepted] if kept else []
        reported = () if confidences is None else tuple(confidences[at][:length])
        results.append(RowResult(line[3 : 3 + length], accepted, block, kept, reported))
    return results


class HostRecords:
    """A ring of records on the host, pinned where the device is CUDA. A copy to it does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._ring: list[tuple[Tensor, Any]] = []  # each with the event after its copy
        self._next = 0

    def send(self, record: Tensor) -> int:
        """Begin to copy a record to the host, and return its index in the ring. The copies keep their order."""
        if not self._ring:
            like = {"dtype": record.dtype, "pin_memory": self._is_cuda}
            events = [torch.cuda.Event() if self._is_cuda else None for _ in range(MAX_IN_FLIGHT)]
            self._ring = [(torch.empty(record.shape, **like), event) for event in events]  # type: ignore[call-overload]
        at, self._next = self._next, (self._next + 1) % MAX_IN_FLIGHT
        held, event = self._ring[at]
        held.copy_(record, non_blocking=True)
        if event is not None:
            event.record()
        return at

    def wait(self, at: int) -> Tensor:
        """The record at an index of the ring, after its copy. It stays valid for `MAX_IN_FLIGHT` more of them."""
        held, event = self._ring[at]
        if event is not None:
            event.synchronize()
        return held


class RecordedRounds:
    """Rounds of a batch, each of which continues where the one before ended: the device itself advances the rows.

    A row that has ended, by a token or by its length, is an empty slot in later rounds.

    Args:
        inputs: the input buffers, which hold the first round's rows.
        recording: of the round.
        lock: held while a round is launched, since recordings share memory.
        num_rows: rows of the batch.
        reports_confidence: whether results have confidences.
        num_left: rounds that the recording has capacity for.
    """

    def __init__(
        self,
        inputs: RoundInputs,
        recording: Recording,
        lock: AbstractContextManager[Any],
        num_rows: int,
        reports_confidence: bool,
        num_left: int,
    ) -> None:
        self._inputs, self.recording, self._lock, self._num_rows = inputs, recording, lock, num_rows
        self._reports_confidence, self._num_left = reports_confidence, num_left
        self._in_flight: deque[int] = deque()

    @property
    def num_in_flight(self) -> int:
        """Rounds that were launched and not taken, at most `MAX_IN_FLIGHT`."""
        return len(self._in_flight)

    @torch.inference_mode()
    def launch(self, kept: Sequence[int] = (), layers: Sequence[int] = ()) -> Tensor | None:
        """Launch the next round, without waiting for the device.

        Args:
            kept: indices of rows.
            layers: numbers of layers below all of them, where the round's key has states.

        Returns:
            of K such rows, at all of their W places, the last hidden states, then those after so many layers,
            `[1 + layers, K, W, hidden_size]`; None for no rows.
        """
        assert len(self._in_flight) < MAX_IN_FLIGHT
        with self._lock:
            self.recording.replay()
            record, *states = self.recording.outputs
            self._in_flight.append(self._inputs.records.send(record))
            if not kept:
                return None
            some = torch.stack([states[layer] for layer in (0, *layers)])
            return some.unflatten(1, (-1, self._inputs.key.width))[:, tensor_of([*kept], some.device)]

    def go_on(self) -> int:
        """Launch the next round if the recording has capacity for one more; the number of rounds launched, 0 or 1."""
        if self._num_left < 1:
            return 0
        self.launch()
        self._num_left -= 1
        return 1

    @property
    def rows(self) -> Tensor:
        """A copy of the rows as the round that was launched last leaves them, int64 `[rows, columns]`."""
        with self._lock:
            return self._inputs.rows[: self._num_rows].clone()

    @property
    def finals(self) -> Tensor | None:
        """A copy of the rows' final states after the round that was launched last, see `RoundInputs`."""
        finals = self._inputs.finals
        with self._lock:
            return None if finals is None else finals[: self._num_rows].clone()

    @torch.inference_mode()
    def take(self) -> list[RowResult]:
        """Wait for the earliest round in flight, and return its results, one per row."""
        record = self._inputs.records.wait(self._in_flight.popleft())
        return read_record(record, self._num_rows, self._inputs.key, self._reports_confidence)
