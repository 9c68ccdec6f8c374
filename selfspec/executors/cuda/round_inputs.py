"""What a recorded round reads and returns: rows uploaded to fixed buffers, and the record of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from selfspec.executors.cuda.static_rows import fill_pages, upload
from selfspec.kernels.layout import GIVEN, MOST_EOS
from selfspec.model.draft_vocabulary import HeldSubset
from selfspec.model.kv_cache import PagedCache

MAX_IN_FLIGHT = 2  # rounds: the host reads the record of one while the device runs the next


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
    vocab: int = 0  # size of the part of the vocabulary that is drafted over; 0: all of it


class RowResult(NamedTuple):
    """The result of a round for one row."""

    drafted: list[int]
    accepted: int  # number of accepted drafted tokens
    block: list[int]  # accepted drafted tokens and the target's next token, before any cut; empty if it ended before
    kept: int  # tokens of the block up to the one that ends the row, at most the row's remaining ones
    confidences: tuple[float, ...]  # of drafted tokens; empty if not reported


class RoundInputs:
    """The input buffers of one recorded round, and the buffers on the host for its results.

    The rows are empty slots until they are filled. A round changes them into the rows of the next round.
    """

    def __init__(self, key: RoundKey, cache: PagedCache, device: torch.device, part: HeldSubset | None = None) -> None:
        self.key, self.part, self.records = key, part, HostRecords(device)
        self._tables: Sequence[Sequence[int]] = ()
        self.rows = torch.zeros((key.slots, GIVEN + key.width), dtype=torch.int64, device=device)
        self.pages = torch.zeros((key.slots, cache.pages_for(key.most_tokens)), dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory of the buffers."""
        return sum(one.nbytes for one in (self.rows, self.pages))

    @property
    def shared(self) -> tuple[HeldSubset, ...]:
        """Buffers that other recordings read, too."""
        return () if self.part is None else (self.part,)

    def fill(self, rows: Sequence[RoundRow]) -> None:
        """Write a round into the buffers. Unused slots become empty."""
        key, lines = self.key, []
        numbers = [[row.temperature, row.top_p, row.min_p] for row in rows]
        floats = np.array(numbers, np.float32).view(np.int32).tolist()
        for row, (temperature, top_p, min_p) in zip(rows, floats, strict=True):
            ids = [*row.eos[:MOST_EOS], *[-1] * (MOST_EOS - len(row.eos))]
            given = [*row.given, *[0] * (key.width - len(row.given))]
            one = [row.last, row.content, row.remaining, row.drafts, row.seed, row.top_k, temperature, top_p, min_p]
            lines.append([*one, *ids, *given])
        empty = [0] * self.rows.shape[1]
        upload(self.rows, lines + [empty] * (key.slots - len(rows)))
        fill_pages(self.pages, self, [row.pages for row in rows])


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
