"""What a recorded round reads and returns: rows uploaded to fixed buffers, and the record of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from selfspec.control.plan import NUM_BINS, Alternatives, SurvivalStop
from selfspec.executors.cuda.host_records import HostRecords
from selfspec.executors.cuda.static_rows import fill_pages, upload
from selfspec.model.draft_vocabulary import HeldSubset
from selfspec.model.kv_cache import PagedCache, Tree

FIELDS = ("last", "content", "room", "drafts", "seed", "top_k", "temperature", "top_p", "min_p")
"""Columns of the uploaded rows. The first ones are those of `kernels.layout.LAST`, `CONTENT` and `ROOM`."""


class RoundRow(NamedTuple):
    """The input of a round for one row."""

    pages: Sequence[int]
    content: int  # number of tokens that it holds; the last one has no keys and values yet
    last: int  # its last token
    room: int  # tokens that it may still emit
    eos: Sequence[int]  # tokens that end it
    drafts: int  # maximum number of tokens to draft, or the number of given ones; below `room` on the device
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
    vocab: int = 0  # size of the part of the vocabulary that is drafted over; 0: all of it
    seconds: int = 0  # maximum second choices per row; 0: drafts are chains

    @property
    def nodes(self) -> int:
        """Places per row for the nodes of its draft."""
        return self.width + self.seconds


class RowResult(NamedTuple):
    """The result of a round for one row."""

    drafted: list[int]  # the chain, then second choices
    accepted: int  # number of accepted drafted tokens
    block: list[int]  # accepted drafted tokens and the target's next token, before any cut; empty if it ended before
    kept: int  # tokens of the block up to the one that ends the row, at most the row's room
    confidences: tuple[float, ...]  # of drafted tokens; empty if not reported
    chain: int = 0  # drafted tokens without second choices
    tree: Tree | None = None  # None: no second choice was drafted
    node: int = 0  # the accepted second choice; 0: none

    @property
    def path(self) -> Sequence[int]:
        """The accepted nodes, from node 0 on."""
        return [*range(self.accepted), self.node] if self.node else range(self.accepted + 1)


class RoundInputs:
    """The input buffers of one recorded round, and the places on the host for its results.

    The rows are empty slots until they are filled. A round changes them into the rows of the next round.
    """

    def __init__(self, key: RoundKey, cache: PagedCache, device: torch.device, part: HeldSubset | None = None) -> None:
        self.key, self.part, self.records = key, part, HostRecords()
        self._tables: Sequence[Sequence[int]] = ()
        columns = len(FIELDS) + key.most_eos + key.width
        self.rows = torch.zeros((key.slots, columns), dtype=torch.int64, device=device)
        self.stops = torch.zeros(2 + NUM_BINS, dtype=torch.float64, device=device)
        self.rule = torch.zeros(2 + 2 * NUM_BINS, dtype=torch.float64, device=device)
        """Of second choices: `least`, `enough`, `right` and `second`; see `kernels.draft_tree.grow`."""
        self.pages = torch.zeros((key.slots, cache.pages_for(key.most_tokens)), dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory of the buffers."""
        return sum(one.nbytes for one in (self.rows, self.stops, self.rule, self.pages))

    @property
    def shared(self) -> tuple[HeldSubset, ...]:
        """Buffers that other recordings read, too."""
        return () if self.part is None else (self.part,)

    def fill(
        self,
        rows: Sequence[RoundRow],
        min_confidence: float,
        stop: SurvivalStop | None,
        rule: Alternatives | None = None,
    ) -> None:
        """Write a round into the buffers. Unused slots become empty."""
        key, lines = self.key, []
        numbers = [[row.temperature, row.top_p, row.min_p] for row in rows]
        floats = np.array(numbers, np.float32).view(np.int32).tolist()
        for row, (temperature, top_p, min_p) in zip(rows, floats, strict=True):
            ids = [*row.eos, *[-1] * (key.most_eos - len(row.eos))]
            given = [*row.given, *[0] * (key.width - len(row.given))]
            one = [row.last, row.content, row.room, row.drafts, row.seed, row.top_k, temperature, top_p, min_p]
            lines.append([*one, *ids, *given])
        empty = [0] * self.rows.shape[1]
        upload(self.rows, lines + [empty] * (key.slots - len(rows)))
        if key.stop != "none":
            upload(self.stops, [min_confidence, *((stop.least, *stop.calibration) if stop else [0.0] * (NUM_BINS + 1))])
        if key.seconds and rule is not None:
            upload(self.rule, [rule.least, rule.enough, *rule.right, *rule.second])
        fill_pages(self.pages, self, [row.pages for row in rows])


def read_record(record: Tensor, num_rows: int, key: RoundKey, reports_confidence: bool) -> list[RowResult]:
    """The results of all rows, from the record on the host: `Accepted.record`, the bits of confidences, and trees.

    A tree is its numbers of nodes and of tokens of the chain, the accepted second choice, and tokens and parents of its
    nodes.
    """
    width, results = key.width, list[RowResult]()
    whole = record[:num_rows].numpy()
    bits = whole[:, 3 + 2 * width : 2 + 3 * width]
    sure = bits.astype(np.int32).view(np.float32).tolist() if reports_confidence else None
    for at, line in enumerate(whole.tolist()):
        length, accepted, kept = line[:3]
        drafted, tree, node = line[3 : 3 + length], None, 0
        if key.seconds:
            count, length, node, *nodes = line[2 + 3 * width :]
            drafted = nodes[1:count]
            tree = Tree((-1, *nodes[1 + key.nodes : key.nodes + count])) if count > length + 1 else None
        block = line[3 + width : 4 + width + accepted] if kept else []
        reported = () if sure is None else tuple(sure[at][:length])
        results.append(RowResult(drafted, accepted, block, kept, reported, length, tree, node))
    return results
