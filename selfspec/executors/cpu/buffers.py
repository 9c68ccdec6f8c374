"""What compiled rounds are told, what they tell, and the buffers that this lies in."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from selfspec.executors.cpu.body import FEW, CompiledBody
from selfspec.executors.cpu.packed import Packed
from selfspec.executors.cpu.told import Logprobs, Told
from selfspec.executors.logprobs import TokenLogprobs
from selfspec.kernels import compiled_call as c
from selfspec.model.kv_cache import Span

MOST_SEEN = 1 << 24  # numbers, 64 MiB


class Stops(NamedTuple):
    """Where rows end their drafts before their length; see `selfspec.control.plan.Plan`."""

    min_confidence: float = 0.0
    edges: Sequence[float] = ()  # between bins of confidence
    calibration: Sequence[float] | None = None  # by bin: how often a token is right; None: no rows stop together
    least: float = 0.0  # mean survival at which they go on


class Beside(NamedTuple):
    """Which second choices are drafted beside first ones; see `selfspec.control.plan.SecondChoices`."""

    edges: Sequence[float]
    right: Sequence[float]
    second: Sequence[float]
    least: float
    enough: float
    most: int


class Drafter(NamedTuple):
    """Which layers draft, and how."""

    exit_layer: int
    head: tuple[Packed, Tensor | None]  # what picks are made from, and the tokens that it is of; None: all
    stops: Stops
    with_sure: bool
    rounded: bool  # copies of the layers in 4 bits draft
    beside: Beside | None = None


# Draft lengths by match, see `selfspec.control.plan.LookupTable`: its lengths, gains and needs.
Table = tuple[Sequence[Sequence[int]], Sequence[Sequence[float]], Sequence[float]]


class Further(NamedTuple):
    """How far rounds go on after the first one: until a row ends."""

    num_rounds: int  # at most, with the first one
    seconds: float  # none begins later
    ends: Sequence[Sequence[int]]  # of every row: tokens that end it
    indices: Sequence[int] | None = None  # of every row: that of its tokens, which is told of them all
    table: Table | None = None  # what rows draft by lookup, with indices

    @property
    def most_looked_up(self) -> int:
        """Tokens that any row drafts by lookup."""
        return 0 if self.table is None else max(map(max, self.table[0]))


class Judged(NamedTuple):
    """What came of a row."""

    drafted: list[int]
    parents: tuple[int, ...] | None  # where they are no chain
    chain: int  # of those that a layer drafted: the first ones, which follow one another
    path: Sequence[int]  # nodes that are right, node 0 first
    block: list[int]  # what the target picked at these
    sure: list[float]  # of the chain
    match: int  # that a draft by lookup follows, else 0
    logprobs: list[TokenLogprobs] | None = None  # of the block, where asked


class Seen(NamedTuple):
    """Where a round leaves hidden states and logits: of all nodes, row after row."""

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


class Buffers:
    """What rounds of `count` rows and at most `most` drafted tokens of each read and write."""

    def __init__(self, body: CompiledBody, count: int, most: int, num_rounds: int) -> None:
        self.count, self.most, self.size = count, most, (count, most, num_rounds)
        self._positions, self._lengths, self._last, self._rooms = (_ints(count) for _ in range(4))
        # Of one round after the other:
        self._drafted, self._counts, self._chains, self._accepted, self._matches = (
            _ints(num_rounds * count) for _ in range(5)
        )
        self._tokens, self._parents = (_ints(num_rounds * count * most) for _ in range(2))
        self._path, self._picks = (_ints(num_rounds * count * (most + 1)) for _ in range(2))
        self._sure = (ctypes.c_float * (num_rounds * count * most))()
        self._steps, self._taken = (ctypes.c_double * (num_rounds * 3 * most))(), (ctypes.c_double * (num_rounds * 4))()
        # Of the last one:
        self._written, self._others = (_ints(count * most) for _ in range(2))
        self._hidden = body.embedding.new_empty(count, most, body.embedding.shape[1])
        self._pages: tuple[list[Sequence[int]], Any] = [], None
        self._how: tuple[bytes, Any] = b"", None
        self._told: Told | None = None
        self._stops: Stops | None = None
        self._numbers: Any = None  # which the stop points to
        self._beside: tuple[Beside | None, Any, Any] = None, None, None
        self._table: tuple[Table | None, Sequence[Any]] = None, ()
        self._ends: tuple[Sequence[Sequence[int]], Any, Any] = [], None, None
        self._indices = (ctypes.c_void_p * count)()
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
        self._program = c.Program(rounds=1, rooms=at(self._rooms), given=at(self._given), matches=at(self._matches))
        self.places = [ctypes.byref(one) for one in (self.drafting, self.judging, self._program)]

    def tell(
        self, rows: Sequence[Span], lengths: list[int], last: Sequence[int], how: bytes, rooms: Sequence[int]
    ) -> None:
        """Of a round that begins."""
        self._positions[:] = [row.start for row in rows]
        self._lengths[:] = lengths
        self._last[:], self._rooms[:] = last, rooms
        for counts in (self._counts, self._chains, self._drafted):
            counts[: self.count] = [0] * self.count
        ctypes.memset(self._matches, 0, ctypes.sizeof(self._matches))
        pages = [row.pages for row in rows]
        if pages != self._pages[0]:
            longest = max(map(len, pages))
            flat = [page for own in pages for page in (*own, *[0] * (longest - len(own)))]
            self._pages = [list(own) for own in pages], (ctypes.c_int64 * len(flat))(*flat)
            self.drafting.pages, self.drafting.row_pages = ctypes.addressof(self._pages[1]), longest
        if how != self._how[0]:
            self._how = how, ctypes.create_string_buffer(how, len(how))
            self.drafting.how = ctypes.addressof(self._how[1])

    def give(self, row: int, tokens: Sequence[int]) -> None:
        """A row's draft in the first round, that no layer makes."""
        count, at = len(tokens), row * self.most
        self._counts[row] = count
        self._tokens[at : at + count], self._parents[at : at + count] = tokens, range(count)

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
            self._beside = beside, c.SecondChoices(*map(ctypes.addressof, lists), *numbers), lists
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
            judging.taps = ctypes.addressof(self._taps) if seen.layers else None
            judging.logits = seen.logits.data_ptr()

    def mind(self, told: Told | None) -> Logprobs | None:
        """What rows with penalties hold; where log-probabilities will stand, if any are asked for."""
        self._told = told  # what the program points to
        none = (None, None, None)
        program, judging = self._program, self.judging
        program.texts, program.text_ends, program.num_prompts = none if told is None else told.texts()
        logprobs = None if told is None else told.logprobs(self.most, self.size[2])
        judging.num_likely = None
        if logprobs is not None:
            logprobs.show(judging)
        return logprobs

    def go_on(self, further: Further, is_given: bool) -> None:
        """How far, after the first round, whose drafts are given or not."""
        program, table = self._program, further.table
        self._given[0] = is_given
        program.rounds, program.seconds = further.num_rounds, further.seconds
        if further.ends != self._ends[0] or self._ends[1] is None:
            flat = [token for own in further.ends for token in own]
            stops = [0, *accumulate(map(len, further.ends))]
            self._ends = further.ends, (ctypes.c_int64 * len(flat))(*flat), (ctypes.c_int64 * len(stops))(*stops)
        program.ends, program.stops = map(ctypes.addressof, self._ends[1:])
        program.indices = None if further.indices is None else ctypes.addressof(self._indices)
        if further.indices is None or table is None:
            return
        self._indices[:] = [*further.indices]
        if table is not self._table[0]:
            lengths, gains, needs = table
            flat_lengths = [min(n, self.most) for own in lengths for n in own]  # they may exceed 64 bits
            flat_gains = [gain for own in gains for gain in own]
            arrays = (ctypes.c_int64 * len(flat_lengths))(*flat_lengths), doubles(flat_gains), doubles(needs)
            self._table = table, arrays
        program.lengths, program.gains, program.needs = map(ctypes.addressof, self._table[1])
        program.num_needs = len(table[2])

    def done(self, drafter: Drafter | None, logprobs: Logprobs | None = None) -> list[Done]:
        """What came of every round."""
        num_rounds, count = self._program.done, self.count
        own, most, with_sure = num_rounds * count, self.most, drafter is not None and drafter.with_sure
        counts, chains, accepted, matches = (
            part[:own] for part in (self._counts, self._chains, self._accepted, self._matches)
        )
        given, drafted, taken = self._given[:num_rounds], self._drafted[:own], self._taken[: 4 * num_rounds]
        # Of these a round may have filled little.
        tokens, steps, picks, sure = self._tokens, self._steps, self._picks, self._sure
        rows = []
        for at, (length, chain, right, match) in enumerate(zip(counts, chains, accepted, matches, strict=True)):
            first, to = at * most, at * (most + 1)
            path, tree = range(right), None
            if length != chain and (parents := tuple(self._parents[first : first + length])) != tuple(range(length)):
                path, tree = self._path[to : to + right], parents
            block, certain = picks[to : to + right], sure[first : first + chain] if with_sure else []
            told = None if logprobs is None else logprobs.read(at, block)
            rows.append(Judged(tokens[first : first + length], tree, chain, path, block, certain, match, told))
        done = []
        for at in range(num_rounds):
            row, step = at * count, at * 3 * most
            last = step if given[at] else step + 3 * max(drafted[row : row + count])
            done.append(Done(rows[row : row + count], bool(given[at]), steps[step:last], taken[4 * at : 4 * at + 4]))
        return done


def stop_of(stops: Stops) -> tuple[c.Stop, Any]:
    """What compiled functions are told, and what that points to, to be kept as long."""
    edges, calibration = doubles(stops.edges), None if stops.calibration is None else doubles(stops.calibration)
    told = None if calibration is None else ctypes.addressof(calibration)
    return c.Stop(stops.min_confidence, stops.least, ctypes.addressof(edges), told, len(edges)), (edges, calibration)


def doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(values))(*values)


def _ints(count: int) -> Any:
    return (ctypes.c_int64 * count)()
