"""Whole rounds in one call of the compiled body: drafts, their verification, and the target's picks.

Python between the parts of a round runs on cold caches, through which weights have just been streamed: that took as
long as a quarter of a small model's round. Between two rounds it does so, too, unless they are done in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from selfspec.kernels import compiled_call as c
from selfspec.target.cache import PagedCache, Span
from selfspec.target.compiled import FEW, CompiledBody
from selfspec.target.round_room import Done, Drafter, Further, Given, Seen
from selfspec.target.spare_rooms import Spare

STEP = 8  # drafted tokens: buffers are made for so many, or for a power of two
MOST_ROUNDS, MANY_ROUNDS = 256, 64  # in one call of few rows, and of any number
ROUNDS_OF_ROWS = 1024  # rounds times rows that take little memory


_spare: WeakKeyDictionary[CompiledBody, Spare] = WeakKeyDictionary()


def most_rounds(count: int) -> int:
    """In one call of so many rows."""
    return min(MOST_ROUNDS, max(MANY_ROUNDS, ROUNDS_OF_ROWS // count))


class Rounds:
    """Rounds of the rows of one engine. What they are told and tell lies where it lay in earlier ones of the model."""

    def __init__(self, body: CompiledBody) -> None:
        self._body, self._lib = body, c.functions()
        self._spare = _spare.setdefault(body, Spare())

    def run(
        self,
        cache: PagedCache,
        rows: Sequence[Span],
        last: Sequence[int],
        how: bytes,
        rooms: Sequence[int],
        drafter: Drafter | None,
        given: Sequence[Given | None] = (),
        further: Further | None = None,
        seen: Seen | None = None,
    ) -> list[Done]:
        """Draft and verify for every row; keys and values are written from its last token on, and stand in its order.

        Args:
            rows: of each, the position of its last token, and how many tokens layers draft at most.
            last: every row's last token.
            how: what `kernels.compiled_pick.told` says of every row.
            rooms: the most tokens that each row may draft, with those beside.
            drafter: None where no layer drafts.
            given: every row's draft in the first round, where no layer makes it.
            further: how far rounds go on, at most `most_rounds` of them; None: there is one.
            seen: where to leave what layers are looked at by, of a single round; all of them then read all of it.

        Raises:
            MemoryError: there is too little of it.
        """
        body, lengths = self._body, [row.length for row in rows]
        beside = None if drafter is None else drafter.beside
        more = 0 if beside is None else beside.most
        drafts = [0 if one is None else len(one.tokens) for one in given] or lengths
        most = max(*drafts, max(lengths) + more, 0 if further is None else further.most_looked_up)
        longest = max([row.start + n for row, n in zip(rows, drafts, strict=True)]) + 1 + more
        if further is not None:  # rows fill their rooms at most
            filled = max([row.start + own for row, own in zip(rows, rooms, strict=True)]) + 1
            longest = max(longest, min(longest + (further.most_rounds - 1) * (most + 1), filled))
        model, layers = body.structs(cache)
        num_rounds = 1 if further is None else most_rounds(len(rows))
        room = self._spare.take(body, (len(rows), max(STEP, 1 << (most - 1).bit_length()), num_rounds))
        drafting, judging = room.drafting, room.judging
        room.tell(rows, lengths, last, how, rooms)
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
            room.draft_by(drafter)
        room.look(seen)
        room.go_on(further, drafter is None or bool(given))
        has_failed = self._lib.selfspec_rounds(ctypes.byref(model), *room.places)
        done = [] if has_failed else room.done(drafter, further)
        self._spare.give_back(room)
        if has_failed:
            tokens = sum(drafts) + len(rows)
            raise MemoryError(f"there is too little memory for a round of {tokens} tokens; decode fewer rows at once")
        return done
