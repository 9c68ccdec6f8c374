"""A whole round in one call of the compiled body: drafts, their verification, and the target's picks.

Python between the parts of a round runs on cold caches, through which weights have just been streamed: that took as
long as a quarter of a small model's round.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from selfspec.kernels import compiled_call as c
from selfspec.target.cache import PagedCache, Span
from selfspec.target.compiled import FEW, CompiledBody
from selfspec.target.compiled_draft import Stops, doubles, stop_of
from selfspec.target.packed import Packed

STEP = 8  # drafted tokens: buffers are made for multiples of it
MOST_ROOMS = 8  # that are kept


class Beside(NamedTuple):
    """Which second choices are drafted beside first ones; see `selfspec.control.plan.SecondChoices`."""

    edges: Sequence[float]
    right: Sequence[float]
    second: Sequence[float]
    least: float
    enough: float
    most: int


class Drafter(NamedTuple):
    """Which layers draft, and how; see `compiled_draft.write`."""

    exit_layer: int
    head: tuple[Packed, Tensor | None]
    stops: Stops
    with_sure: bool
    rounded: bool
    beside: Beside | None = None


class Given(NamedTuple):
    """A row's draft that no layer made."""

    tokens: Sequence[int]
    parents: Sequence[int]  # of every token: the node that it goes on from; node 0 is the row's last token


class Judged(NamedTuple):
    """What came of a row."""

    drafted: list[int]
    parents: tuple[int, ...] | None  # where they are no chain
    chain: int  # of those that a layer drafted: the first ones, which follow one another
    path: Sequence[int]  # nodes that are right, node 0 first
    block: list[int]  # what the target picked at these
    sure: list[float]  # of the chain


class Rounds:
    """Rounds of the rows of one engine. What they are told and tell lies where it lay in the last one.

    Attributes:
        steps: seconds of the last round's draft: layers, head, pick of the first token; of the second; ...
        taken: and of early layers on what was drafted last, then of all layers that judged, the head, and picks.
    """

    def __init__(self, body: CompiledBody) -> None:
        self._body, self._lib = body, c.functions()
        self._rooms: dict[tuple[int, int], _Room] = {}
        self.steps: list[float] = []
        self.taken: list[float] = []

    def run(
        self,
        cache: PagedCache,
        rows: Sequence[Span],
        last: Sequence[int],
        how: bytes,
        drafter: Drafter | None,
        given: Sequence[Given | None] = (),
        rooms: Sequence[int] = (),
    ) -> list[Judged]:
        """Draft and verify once for every row; keys and values are written from its last token on.

        Args:
            rows: of each, the position of its last token, and how many tokens are drafted at most, or are given.
            last: every row's last token.
            how: what `kernels.compiled_pick.told` says of every row.
            drafter: None where drafts are given, or there are none.
            given: every row's draft then.
            rooms: the most tokens that each row may draft, with those beside.

        Raises:
            MemoryError: there is too little of it.
        """
        body, lengths = self._body, [row.length for row in rows]
        beside = None if drafter is None else drafter.beside
        more = 0 if beside is None else beside.most
        longest = max([row.start + row.length for row in rows]) + 1 + more
        model, layers = body.structs(cache)
        room = self._room(len(rows), max(lengths) + more)
        drafting, judging = room.drafting, room.judging
        room.tell(rows, lengths, last, how)
        for row, one in enumerate(given):
            if one is not None:
                room.give(row, one)
        tables = body.tables(longest)
        if tables is not room.tables:
            room.tables = tables
            drafting.cos, drafting.sin = tables[0].data_ptr(), tables[1].data_ptr()
        drafting.embedding = body.embedding.data_ptr()
        head = body.packed_head.struct  # of which a `refresh` meanwhile may make another
        judging.layers, judging.longest, judging.head = ctypes.addressof(layers), longest, ctypes.addressof(head)
        judging.threads_few, judging.threads = body.threads(1), body.threads(FEW + 1)
        judging.exit_layer = 0 if drafter is None else drafter.exit_layer
        if drafter is not None:
            rounded = drafter.rounded
            drafters = body.rounded_structs(cache, drafter.exit_layer)[1] if rounded else layers
            judging.drafters, judging.are_copies = ctypes.addressof(drafters), rounded
            draft_head = drafter.head[0].struct
            judging.draft_head = ctypes.addressof(draft_head)
            room.draft_by(drafter, rooms)
        if self._lib.selfspec_round(ctypes.byref(model), room.drafting_at, room.judging_at):
            tokens = sum(lengths) + len(rows)
            raise MemoryError(f"there is too little memory for a round of {tokens} tokens; decode fewer rows at once")
        self.steps, self.taken = room.seconds(drafter is not None)
        return room.judged(drafter is not None and drafter.with_sure)

    def _room(self, count: int, most: int) -> _Room:
        key = count, -(-most // STEP) * STEP
        room = self._rooms.get(key)
        if room is None:
            if len(self._rooms) >= MOST_ROOMS:
                self._rooms.clear()
            room = self._rooms[key] = _Room(self._body, *key)
        return room


class _Room:
    """The arrays that rounds of `count` rows and at most `most` drafted tokens of each read and write."""

    def __init__(self, body: CompiledBody, count: int, most: int) -> None:
        self.count, self.most = count, most
        self._positions, self._lengths, self._last, self._drafted, self._rooms = (_ints(count) for _ in range(5))
        self._counts, self._chains, self._accepted = (_ints(count) for _ in range(3))
        self._written, self._others, self._tokens, self._parents = (_ints(count * most) for _ in range(4))
        self._path, self._picks = (_ints(count * (most + 1)) for _ in range(2))
        self._sure, self._steps = (ctypes.c_float * (count * most))(), (ctypes.c_double * (3 * most))()
        self._taken = (ctypes.c_double * 4)()
        self._hidden = body.embedding.new_empty(count, most, body.embedding.shape[1])
        self._pages: tuple[list[Sequence[int]], Any] = [], None
        self._how: tuple[bytes, Any] = b"", None
        self._stops: Stops | None = None
        self._numbers: Any = None  # which the stop points to
        self._beside: tuple[Beside | None, Any, Any] = None, None, None
        self.tables: tuple[Tensor, Tensor] | None = None  # of rotary angles, that it was told of
        at = ctypes.addressof
        self.drafting = c.Drafting(
            num_rows=count, most=most, norm=body.last_norm.data_ptr(), eps=body.norm.eps, positions=at(self._positions),
            lengths=at(self._lengths), last=at(self._last), counts=at(self._drafted), tokens=at(self._written),
            hidden=self._hidden.data_ptr(), taken=at(self._steps),
        )  # fmt: skip
        self.judging = c.Judging(
            num_layers=len(body.layers), norm=body.last_norm.data_ptr(), few=FEW, most=most, counts=at(self._counts),
            tokens=at(self._tokens), parents=at(self._parents), chains=at(self._chains), accepted=at(self._accepted),
            path=at(self._path), picks=at(self._picks), taken=at(self._taken),
        )  # fmt: skip
        self.drafting_at, self.judging_at = ctypes.byref(self.drafting), ctypes.byref(self.judging)

    def tell(self, rows: Sequence[Span], lengths: list[int], last: Sequence[int], how: bytes) -> None:
        """Of a round that begins."""
        self._positions[:] = [row.start for row in rows]
        self._lengths[:] = lengths
        self._last[:] = last
        self._counts[:] = self._chains[:] = self._drafted[:] = [0] * self.count
        pages = [row.pages for row in rows]
        if pages != self._pages[0]:
            longest = max(map(len, pages))
            flat = [page for own in pages for page in (*own, *[0] * (longest - len(own)))]
            self._pages = [list(own) for own in pages], (ctypes.c_int64 * len(flat))(*flat)
            self.drafting.pages, self.drafting.row_pages = ctypes.addressof(self._pages[1]), longest
        if how != self._how[0]:
            self._how = how, ctypes.create_string_buffer(how, len(how))
            self.drafting.how = ctypes.addressof(self._how[1])

    def give(self, row: int, draft: Given) -> None:
        count, at = len(draft.tokens), row * self.most
        self._counts[row] = count
        self._tokens[at : at + count], self._parents[at : at + count] = draft.tokens, draft.parents

    def draft_by(self, drafter: Drafter, rooms: Sequence[int]) -> None:
        packed, names = drafter.head
        drafting, stops, beside = self.drafting, drafter.stops, drafter.beside
        drafting.vocab, drafting.names = packed.num_outputs, None if names is None else names.data_ptr()
        drafting.sure = ctypes.addressof(self._sure) if drafter.with_sure else None
        drafting.seconds = None if beside is None else ctypes.addressof(self._others)
        if stops is not self._stops:
            self._stops = stops
            drafting.stop, self._numbers = stop_of(stops)
        if beside is None:
            self.judging.seconds = None
            return
        self._rooms[:] = rooms
        if beside is not self._beside[0]:
            lists = [doubles(one) for one in beside[:3]]
            numbers = len(beside.edges), beside.least, beside.enough, ctypes.addressof(self._rooms), beside.most
            self._beside = beside, c.Seconds(*map(ctypes.addressof, lists), *numbers), lists
        self.judging.seconds = ctypes.addressof(self._beside[1])

    def seconds(self, has_drafted: bool) -> tuple[list[float], list[float]]:
        """Of the draft's steps, and of what came after it."""
        return self._steps[: 3 * max(self._drafted)] if has_drafted else [], self._taken[:]

    def judged(self, with_sure: bool) -> list[Judged]:
        done = []
        for row, (count, chain, accepted) in enumerate(zip(self._counts, self._chains, self._accepted, strict=True)):
            at, to = row * self.most, row * (self.most + 1)
            drafted, block = self._tokens[at : at + count], self._picks[to : to + accepted]
            sure, path, tree = self._sure[at : at + chain] if with_sure else [], range(accepted), None
            if count != chain and (parents := tuple(self._parents[at : at + count])) != tuple(range(count)):
                path, tree = self._path[to : to + accepted], parents
            done.append(Judged(drafted, tree, chain, path, block, sure))
        return done


def _ints(count: int) -> Any:
    return (ctypes.c_int64 * count)()
