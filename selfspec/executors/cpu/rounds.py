"""Rounds in one call of the compiled body: drafts, their verification, and the target's picks.

Reading the weights evicts the interpreter's data from the processor's caches. Python code between the parts of a round
took a quarter of a small model's round for that reason. One call for several rounds avoids it between rounds, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from selfspec.executors.cpu.body import FEW, CompiledBody
from selfspec.executors.cpu.buffers import Buffers, Drafter, HiddenStateBuffers, ProgramLimits, RoundResult
from selfspec.executors.cpu.pick_data import PickData
from selfspec.kernels import compiled_call as c
from selfspec.model.kv_cache import PagedCache, Span

MIN_DRAFT_CAPACITY = 8  # drafted tokens per row that buffers are made for; larger capacities are powers of two
MAX_ROUNDS, MAX_ROUNDS_OF_MANY_ROWS = 256, 64  # per call
MAX_ROUNDS_TIMES_ROWS = 1024  # bounds the memory of calls of more than `MAX_ROUNDS_OF_MANY_ROWS` rounds


def max_rounds(count: int) -> int:
    """The maximum number of rounds per call of `count` rows."""
    return min(MAX_ROUNDS, max(MAX_ROUNDS_OF_MANY_ROWS, MAX_ROUNDS_TIMES_ROWS // count))


class CompiledRounds:
    """Runs rounds of one engine's rows. Their buffers come from the body's pool and return to it."""

    def __init__(self, body: CompiledBody) -> None:
        self.body, self._lib = body, c.functions()

    def run(
        self,
        cache: PagedCache,
        rows: Sequence[Span],
        last: Sequence[int],
        sampling: bytes,
        capacities: Sequence[int],
        drafter: Drafter | None,
        limits: ProgramLimits,
        given: Sequence[Sequence[int]] | None = None,
        hidden_states: HiddenStateBuffers | None = None,
        data: PickData | None = None,
    ) -> list[RoundResult]:
        """Draft and verify for every row, and return the results of all rounds.

        Keys and values are written from each row's last token on.

        Args:
            rows: per row, the position of its last token and the maximum number of tokens that layers draft.
            last: per row, its last token.
            sampling: `kernels.compiled_pick.sampling_bytes` of each row, joined.
            capacities: per row, the maximum number of drafted tokens.
            drafter: the layers that draft; None: no layer drafts.
            limits: when the program ends; at most `max_rounds` rounds.
            given: per row, a draft that was made elsewhere; for a single round.
            hidden_states: where to write hidden states and logits, for a single round. All layers then process all
                tokens, those that have drafted, too.
            data: the contents of rows with penalties, and the number of log-probabilities that rows request.

        Raises:
            MemoryError: the buffers of a round cannot be allocated.
        """
        body, lengths, num_rounds = self.body, [row.length for row in rows], limits.num_rounds
        drafts = lengths if given is None else [len(tokens) for tokens in given]
        max_draft = max(*drafts, *lengths, min(limits.max_lookup_draft, max(capacities)), 1)
        longest = max([row.start + n for row, n in zip(rows, drafts, strict=True)]) + 1
        if num_rounds > 1 or limits.table is not None:  # no row exceeds its capacity
            full = max([row.start + own for row, own in zip(rows, capacities, strict=True)]) + 1
            longest = max(longest, min(longest + num_rounds * (max_draft + 1), full))
        model, layers = body.structs(cache)
        round_capacity = 1 if num_rounds == 1 else max_rounds(len(rows))
        size = len(rows), max(MIN_DRAFT_CAPACITY, 1 << (max_draft - 1).bit_length()), round_capacity
        buffers = body.buffer_pool.take(size) or Buffers(body, *size)
        draft, verify = buffers.draft, buffers.verify
        buffers.write_inputs(rows, lengths, last, sampling, capacities)
        for row, tokens in enumerate(given or ()):
            buffers.write_draft(row, tokens)
        tables = body.tables(longest)
        if tables is not buffers.tables:
            buffers.tables = tables
            draft.cos, draft.sin = tables[0].data_ptr(), tables[1].data_ptr()
        embedding = body.embedding_rows()
        draft.embedding = ctypes.addressof(embedding)
        head = body.packed_head.struct  # held here: `refresh` in another thread may replace it
        verify.layers, verify.longest, verify.head = ctypes.addressof(layers), longest, ctypes.addressof(head)
        verify.threads_few, verify.threads = body.threads(1), body.threads(FEW + 1)
        verify.exit_layer = 0 if drafter is None else drafter.exit_layer
        if drafter is not None:
            rounded = drafter.rounded
            drafters = body.rounded_structs(cache, drafter.exit_layer)[1] if rounded else layers
            verify.drafters, verify.are_copies = ctypes.addressof(drafters), rounded
            draft_head = drafter.head[0].struct
            verify.draft_head = ctypes.addressof(draft_head)
            buffers.set_drafter(drafter)
        buffers.set_hidden_states(hidden_states)
        logprobs = buffers.set_picks(data)
        buffers.set_limits(limits, drafter is None)
        has_failed = self._lib.selfspec_program(ctypes.byref(model), *buffers.arguments)
        results = [] if has_failed else buffers.read_results(drafter, logprobs)
        body.buffer_pool.give_back(buffers)
        if has_failed:
            num_tokens = sum(drafts) + len(rows)
            raise MemoryError(
                f"there is too little memory for a round of {num_tokens} tokens; decode fewer rows at once"
            )
        return results
