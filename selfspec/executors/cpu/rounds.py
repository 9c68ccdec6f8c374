"""Rounds in one call of the compiled body: drafts, their verification, and the target's picks.

Python between the parts of a round runs on cold caches, through which weights have just been streamed: that took as
long as a quarter of a small model's round. Between two rounds it does so, too, unless they are done in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from selfspec.executors.cpu.body import FEW, CompiledBody
from selfspec.executors.cpu.buffers import Buffers, Done, Drafter, Further, Seen
from selfspec.executors.cpu.told import Told
from selfspec.kernels import compiled_call as c
from selfspec.model.kv_cache import PagedCache, Span

STEP = 8  # drafted tokens: buffers are made for so many, or for a power of two
MOST_ROUNDS, MANY_ROUNDS = 256, 64  # in one call of few rows, and of any number
ROUNDS_OF_ROWS = 1024  # rounds times rows that take little memory


def most_rounds(count: int) -> int:
    """In one call of so many rows."""
    return min(MOST_ROUNDS, max(MANY_ROUNDS, ROUNDS_OF_ROWS // count))


class CompiledRounds:
    """Rounds of the rows of one engine. What they are told and tell lies where it lay in earlier ones of the model."""

    def __init__(self, body: CompiledBody) -> None:
        self.body, self._lib = body, c.functions()

    def run(
        self,
        cache: PagedCache,
        rows: Sequence[Span],
        last: Sequence[int],
        how: bytes,
        rooms: Sequence[int],
        drafter: Drafter | None,
        further: Further,
        given: Sequence[Sequence[int]] | None = None,
        seen: Seen | None = None,
        told: Told | None = None,
    ) -> list[Done]:
        """Draft and verify for every row; keys and values are written from its last token on, and stand in its order.

        Args:
            rows: of each, the position of its last token, and how many tokens layers draft at most.
            last: every row's last token.
            how: what `kernels.compiled_pick.told` says of every row.
            rooms: the most tokens that each row may draft, with those beside.
            drafter: None where no layer drafts.
            further: how far rounds go on, at most `most_rounds` of them.
            given: every row's draft in the only round, where no layer makes it.
            seen: where to leave what layers are looked at by, of a single round; all of them then read all of it.
            told: what rows with penalties hold, and which log-probabilities are asked for.

        Raises:
            MemoryError: there is too little of it.
        """
        body, lengths, num_rounds = self.body, [row.length for row in rows], further.num_rounds
        beside = None if drafter is None else drafter.beside
        more = 0 if beside is None else min(beside.most, max(lengths))
        drafts = lengths if given is None else [len(tokens) for tokens in given]
        most = max(*drafts, max(lengths) + more, min(further.most_looked_up, max(rooms)), 1)
        longest = max([row.start + n for row, n in zip(rows, drafts, strict=True)]) + 1 + more
        if num_rounds > 1 or further.table is not None:  # rows fill their rooms at most
            filled = max([row.start + own for row, own in zip(rows, rooms, strict=True)]) + 1
            longest = max(longest, min(longest + num_rounds * (most + 1), filled))
        model, layers = body.structs(cache)
        held = 1 if num_rounds == 1 else most_rounds(len(rows))
        size = len(rows), max(STEP, 1 << (most - 1).bit_length()), held
        buffers = body.spare.take(size) or Buffers(body, *size)
        drafting, judging = buffers.drafting, buffers.judging
        buffers.tell(rows, lengths, last, how, rooms)
        for row, tokens in enumerate(given or ()):
            buffers.give(row, tokens)
        tables = body.tables(longest)
        if tables is not buffers.tables:
            buffers.tables = tables
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
            buffers.draft_by(drafter)
        buffers.look(seen)
        logprobs = buffers.mind(told)
        buffers.go_on(further, drafter is None)
        has_failed = self._lib.selfspec_program(ctypes.byref(model), *buffers.places)
        done = [] if has_failed else buffers.done(drafter, logprobs)
        body.spare.give_back(buffers)
        if has_failed:
            tokens_in_all = sum(drafts) + len(rows)
            raise MemoryError(
                f"there is too little memory for a round of {tokens_in_all} tokens; decode fewer rows at once"
            )
        return done
