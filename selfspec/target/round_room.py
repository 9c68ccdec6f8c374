"""What rounds in compiled calls are told, what they tell, and the arrays that this lies in."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from selfspec.kernels import compiled_call as c
from selfspec.target.cache import Span
from selfspec.target.compiled import FEW, CompiledBody
from selfspec.target.compiled_draft import Stops, doubles, stop_of
from selfspec.target.packed import Packed

MOST_SEEN = 1 << 24  # numbers, 64 MiB


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


# What rows of a batch draft by lookup, see `selfspec.control.plan.Lookups`: its lengths, gains and needs.
Lookups = tuple[Sequence[Sequence[int]], Sequence[Sequence[float]], Sequence[float]]


class Further(NamedTuple):
    """How far rounds go on after the first one: as long as every row has room, no token ends one, and nobody has to be
    asked. Where layers draft, one row has room for that; another may have room for its last token alone."""

    num_rounds: int  # at most, with the first one
    seconds: float  # none begins later
    ends: Sequence[Sequence[int]]  # of every row: tokens that end it
    indices: Sequence[int | None] = ()  # of every row: that of its tokens, which is told of them all; empty: none
    found_size: int = 0  # numbers that these tell at most
    lengths: Sequence[int] = ()  # by match: see `selfspec.control.plan.Steady`; the same of the next three
    branches: Sequence[bool] = ()
    grown: Sequence[int] = ()
    streak: int = 0
    most_surprises: int = 1 << 30
    kept: int = 0
    watched: Sequence[bool] = ()
    match: int = 0  # of a single row, before the first round
    lookups: Lookups | None = None  # of a batch, in the place of `lengths`
    longer: int = 0  # rounds beyond `num_rounds`, one for each drafted by lookup

    @property
    def most_rounds(self) -> int:
        return self.num_rounds + self.longer

    @property
    def most_looked_up(self) -> int:
        """Tokens that any row drafts by lookup."""
        if self.lookups is not None:
            return max(map(max, self.lookups[0]))
        return max((*self.lengths, *self.grown), default=0)


class Judged(NamedTuple):
    """What came of a row."""

    drafted: list[int]
    parents: tuple[int, ...] | None  # where they are no chain
    chain: int  # of those that a layer drafted: the first ones, which follow one another
    path: Sequence[int]  # nodes that are right, node 0 first
    block: list[int]  # what the target picked at these
    sure: list[float]  # of the chain


class Seen(NamedTuple):
    """Where a round leaves what shadow picks are made from: of all nodes, row after row."""

    layers: Sequence[int]  # ascending
    hidden: Tensor  # [layers, at least as many nodes, hidden_size]: after each of them
    logits: Tensor  # [at least as many nodes, vocab]: the target's

    @classmethod
    def of(cls, body: CompiledBody, layers: Sequence[int], num_nodes: int) -> Seen | None:
        """Room for so many nodes; None where that is much."""
        size, vocab = body.embedding.shape[1], body.packed_head.num_outputs
        if num_nodes * (len(layers) * size + vocab) > MOST_SEEN:
            return None
        hidden = body.embedding.new_empty(len(layers), num_nodes, size)
        return cls(layers, hidden, body.embedding.new_empty(num_nodes, vocab))


class Done(NamedTuple):
    """What came of a round."""

    rows: list[Judged]
    is_given: bool  # no layer drafted, if anything was drafted
    steps: list[float]  # seconds of the draft: layers, head, pick of the first token; of the second; ...
    taken: list[float]  # and of early layers on what was drafted last, then of all layers that judged, head, and picks
    found: list[list[int] | None]  # by row: what its index tells after the round's tokens, where it was told of them


class Room:
    """The arrays that rounds of `count` rows and at most `most` drafted tokens of each read and write."""

    def __init__(self, body: CompiledBody, count: int, most: int, num_rounds: int) -> None:
        self.count, self.most, self.size = count, most, (count, most, num_rounds)
        self._positions, self._lengths, self._last, self._rooms = (_ints(count) for _ in range(4))
        # Of one round after the other:
        self._drafted, self._counts, self._chains, self._accepted = (_ints(num_rounds * count) for _ in range(4))
        self._tokens, self._parents = (_ints(num_rounds * count * most) for _ in range(2))
        self._path, self._picks = (_ints(num_rounds * count * (most + 1)) for _ in range(2))
        self._sure = (ctypes.c_float * (num_rounds * count * most))()
        self._steps, self._taken = (ctypes.c_double * (num_rounds * 3 * most))(), (ctypes.c_double * (num_rounds * 4))()
        # Of the last one:
        self._written, self._others = (_ints(count * most) for _ in range(2))
        self._hidden = body.embedding.new_empty(count, most, body.embedding.shape[1])
        self._pages: tuple[list[Sequence[int]], Any] = [], None
        self._how: tuple[bytes, Any] = b"", None
        self._stops: Stops | None = None
        self._numbers: Any = None  # which the stop points to
        self._beside: tuple[Beside | None, Any, Any] = None, None, None
        self._table: tuple[Any, Sequence[Any]] = None, ()  # of lengths, branches and so on, by match
        self._shared: tuple[Lookups | None, Sequence[Any]] = None, ()  # the same of a batch
        self._ends: tuple[Sequence[Sequence[int]], Any, Any] = [], None, None
        self._indices, self._found = (ctypes.c_void_p * count)(), _ints(0)
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
        self._given = _ints(num_rounds)
        self._taps = (ctypes.c_void_p * len(body.layers))()
        arrays = (one for one in vars(self).values() if isinstance(one, ctypes.Array))
        self.num_bytes = self._hidden.nbytes + sum(map(ctypes.sizeof, arrays))
        self._ahead = c.Ahead(rounds=1, rooms=at(self._rooms), given=at(self._given))
        self.places = [ctypes.byref(one) for one in (self.drafting, self.judging, self._ahead)]

    def tell(
        self, rows: Sequence[Span], lengths: list[int], last: Sequence[int], how: bytes, rooms: Sequence[int]
    ) -> None:
        """Of a round that begins."""
        self._positions[:] = [row.start for row in rows]
        self._lengths[:] = lengths
        self._last[:], self._rooms[:] = last, rooms
        for counts in (self._counts, self._chains, self._drafted):
            counts[: self.count] = [0] * self.count
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

    def draft_by(self, drafter: Drafter) -> None:
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
        if beside is not self._beside[0]:
            lists = [doubles(one) for one in beside[:3]]
            numbers = len(beside.edges), beside.least, beside.enough, ctypes.addressof(self._rooms), beside.most
            self._beside = beside, c.Seconds(*map(ctypes.addressof, lists), *numbers), lists
        self.judging.seconds = ctypes.addressof(self._beside[1])

    def look(self, seen: Seen | None) -> None:
        """At layers, as all of them judge."""
        judging = self.judging
        judging.taps = judging.logits = None
        if seen is not None:
            for i in range(judging.num_layers):
                self._taps[i] = None
            for layer, hidden in zip(seen.layers, seen.hidden, strict=True):
                self._taps[layer - 1] = hidden.data_ptr()
            judging.taps, judging.logits = ctypes.addressof(self._taps), seen.logits.data_ptr()

    def go_on(self, further: Further | None, is_given: bool) -> None:
        """How far, after the first round, whose drafts are given or not."""
        ahead = self._ahead
        self._given[0] = is_given
        if further is None:
            ahead.rounds, ahead.longer, ahead.seconds, ahead.indices = 1, 0, 0.0, None
            ahead.ends = ahead.stops = None
            return
        ahead.rounds, ahead.longer, ahead.seconds = further.num_rounds, further.longer, further.seconds
        if further.ends != self._ends[0] or self._ends[1] is None:
            flat = [token for own in further.ends for token in own]
            stops = [0, *accumulate(map(len, further.ends))]
            self._ends = further.ends, (ctypes.c_int64 * len(flat))(*flat), (ctypes.c_int64 * len(stops))(*stops)
        ahead.ends, ahead.stops = map(ctypes.addressof, self._ends[1:])
        ahead.indices = ctypes.addressof(self._indices) if further.indices else None
        if further.indices:
            self._indices[:] = [*further.indices]
            size = further.most_rounds * self.count * further.found_size
            if len(self._found) < size:
                self._found = _ints(size)
            ahead.found, ahead.found_size = ctypes.addressof(self._found), further.found_size
            count = ahead.num_lengths = len(further.lengths)
            told = further.lengths, further.branches, further.grown
            if told != self._table[0]:
                lists = further.lengths, further.branches or [False] * count, further.grown
                self._table = told, [(ctypes.c_int64 * len(one))(*one) for one in lists]
            ahead.lengths, ahead.branches, ahead.grown = map(ctypes.addressof, self._table[1])
            ahead.num_grown, ahead.streak = len(further.grown), further.streak
            ahead.match = further.match
            ahead.most_surprises, ahead.kept = further.most_surprises, further.kept
            ahead.watched = sum([0xFF << 8 * at for at, counts in enumerate(further.watched) if counts])
            self._share(further.lookups)

    def _share(self, lookups: Lookups | None) -> None:
        """What rows of a batch draft by lookup, if they do."""
        ahead = self._ahead
        if lookups is None:
            ahead.needs = None
            return
        if lookups != self._shared[0]:  # equal ones are mostly the same, which is soon seen
            lengths, gains, needs = lookups
            flat = [n for own in lengths for n in own], [gain for own in gains for gain in own]
            self._shared = lookups, [(ctypes.c_int64 * len(flat[0]))(*flat[0]), doubles(flat[1]), doubles(needs)]
        ahead.lengths, ahead.gains, ahead.needs = map(ctypes.addressof, self._shared[1])
        ahead.num_lengths, ahead.num_needs = len(lookups[0][0]), len(lookups[2])

    def done(self, drafter: Drafter | None, further: Further | None) -> list[Done]:
        """What came of every round."""
        num_rounds, count = self._ahead.done, self.count
        own, most, with_sure = num_rounds * count, self.most, drafter is not None and drafter.with_sure
        counts, chains, accepted = self._counts[:own], self._chains[:own], self._accepted[:own]
        given, drafted, taken = self._given[:num_rounds], self._drafted[:own], self._taken[: 4 * num_rounds]
        # Of these a round may have filled little.
        tokens, steps, picks, sure = self._tokens, self._steps, self._picks, self._sure
        rows, found = [], self._told(own, further)
        for at, (length, chain, right) in enumerate(zip(counts, chains, accepted, strict=True)):
            first, to = at * most, at * (most + 1)
            path, tree = range(right), None
            if length != chain and (parents := tuple(self._parents[first : first + length])) != tuple(range(length)):
                path, tree = self._path[to : to + right], parents
            block, certain = picks[to : to + right], sure[first : first + chain] if with_sure else []
            rows.append(Judged(tokens[first : first + length], tree, chain, path, block, certain))
        done = []
        for at in range(num_rounds):
            row, step = at * count, at * 3 * most
            last = step if given[at] else step + 3 * max(drafted[row : row + count])
            seconds = steps[step:last], taken[4 * at : 4 * at + 4]
            done.append(Done(rows[row : row + count], bool(given[at]), *seconds, found[row : row + count]))
        return done

    def _told(self, num_rows: int, further: Further | None) -> list[list[int] | None]:
        """What the index of every row told in every round; None where it was not told of its tokens."""
        if further is None or not further.indices:
            return [None] * num_rows
        size, told = further.found_size, self._found
        firsts = zip(range(0, num_rows * size, size), [*further.indices] * (num_rows // self.count), strict=True)
        return [None if index is None else told[at + 1 : at + 5 + told[at]] for at, index in firsts]


def _ints(count: int) -> Any:
    return (ctypes.c_int64 * count)()
