"""`CpuExecutor`: runs the rounds of a plan in one compiled call."""

from __future__ import annotations

import ctypes
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from selfspec.control.plan import CONFIDENCE_EDGES, SurvivalStop, table_of
from selfspec.core import LOOKUP, Plan, RoundOutput, RowRound, Sequence, StageSeconds
from selfspec.drafting.grammar import most_forced
from selfspec.executors.after_round import add_shadow_picks
from selfspec.executors.base import Executor, RoundDraft, next_exit
from selfspec.executors.cpu.body import FEW, CompiledBody
from selfspec.executors.cpu.buffers import (
    Buffers,
    Drafter,
    HiddenStateBuffers,
    ProgramLimits,
    RoundResult,
    RowResult,
    StopRule,
)
from selfspec.executors.cpu.grammars import ProgramGrammars
from selfspec.executors.cpu.pick_data import PickData
from selfspec.executors.final_states import before_each, states_of
from selfspec.executors.logit_rules import are_rules
from selfspec.executors.penalties import Penalties
from selfspec.executors.picker import Picker, packed_params
from selfspec.kernels import compiled_call as c
from selfspec.kernels.pick import filtered
from selfspec.model.kv_cache import PagedCache, Span
from selfspec.model.split_model import SplitModel

MIN_DRAFT_CAPACITY = 8  # drafted tokens per row that buffers are made for; larger capacities are powers of two
MAX_ROUNDS, MAX_ROUNDS_OF_MANY_ROWS = 256, 64  # per call
FOLLOW_FAILED = 2  # what a program returns then, see `kernels/cpu/program.cpp`
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
        rows: abc.Sequence[Span],
        last: abc.Sequence[int],
        sampling: bytes,
        capacities: abc.Sequence[int],
        drafter: Drafter | None,
        limits: ProgramLimits,
        given: abc.Sequence[abc.Sequence[int]] | None = None,
        hidden_states: HiddenStateBuffers | None = None,
        data: PickData | None = None,
        grammars: ProgramGrammars | None = None,
        finals: Tensor | None = None,
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
            data: the contents of rows with penalties or a bias, and the number of log-probabilities that rows request.
            grammars: of rows that have one; drafts are then over the whole vocabulary.
            finals: fp32 `[rows, hidden_size]`, contiguous: the final state of the token before each row's last one, in
                and out; needed where the exit layer has a trained head.

        Raises:
            MemoryError: the buffers of a round cannot be allocated.
            GrammarError: a grammar cannot be followed.
        """
        body, lengths, num_rounds = self.body, [row.length for row in rows], limits.num_rounds
        drafts = lengths if given is None else [len(tokens) for tokens in given]
        max_draft = max(*drafts, *lengths, min(limits.max_given_draft, max(capacities)), 1)
        longest = max([row.start + n for row, n in zip(rows, drafts, strict=True)]) + 1
        if num_rounds > 1 or limits.max_given_draft:  # no row exceeds its capacity
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
        buffers.set_finals(finals)
        buffers.set_hidden_states(hidden_states)
        logprobs = buffers.set_picks(data)
        buffers.set_grammars(grammars)
        buffers.set_limits(limits, drafter is None)
        failure = self._lib.selfspec_program(ctypes.byref(model), *buffers.arguments)
        results = [] if failure else buffers.read_results(drafter, logprobs)
        buffers.set_grammars(None)
        body.buffer_pool.give_back(buffers)
        if failure == FOLLOW_FAILED and grammars is not None:
            grammars.raise_problem()
        if failure:
            num_tokens = sum(drafts) + len(rows)
            raise MemoryError(
                f"there is too little memory for a round of {num_tokens} tokens; decode fewer rows at once"
            )
        return results


class CpuExecutor(Executor):
    """Runs plans by compiled code; it serves stacks whose layers are compiled. Picks equal the eager executor's.

    A plan's alternatives are left out. One call runs a whole plan, up to the number of rounds that its buffers hold.
    Rounds with a probe and rounds that keep logits take one call each.
    """

    def __init__(
        self,
        split: SplitModel,
        cache: PagedCache,
        picker: Picker,
        new_seconds: Callable[[], StageSeconds] = StageSeconds,
    ) -> None:
        super().__init__(split, cache, picker, new_seconds)
        body = split.compiled if picker.is_compiled and split.runner is None else None
        self._rounds = CompiledRounds(body) if isinstance(body, CompiledBody) else None

    def serves(self, rows: list[Sequence], plan: Plan) -> bool:
        """Whether the plan can run in compiled code; see `Executor.serves`."""
        if self._rounds is None or plan.keep_divergence:
            return False
        processes = any(row.has_processors for row in rows)
        if processes and not all(are_rules(row.request.params.processors) for row in rows):
            return False
        if any(_may_ban_all_tokens(row, self.split.vocab_size) for row in rows):
            return False
        if plan.exit_layer and self._drafter(plan, rows) is None:
            return False
        keeps = any(row.request.keep_logits for row in rows)
        if keeps and (processes or any(row.grammar is not None for row in rows)):
            return False
        return not (keeps or plan.shadow is not None) or self._hidden_state_buffers(rows, plan) is not None

    def run(self, rows: list[Sequence], plan: Plan, deadline: float) -> Iterator[RoundOutput]:
        """Run the rounds of a plan, in one call if possible; see `Executor.run`."""
        keeps = any(row.request.keep_logits for row in rows)
        lookups = [] if table_of(plan) is None else [row.lookup.compiled() for row in rows]
        texts = [one for one in lookups if one is not None]  # held as long as the program runs
        if keeps or plan.shadow is not None or len(texts) < len(lookups):
            yield from super().run(rows, plan, deadline)
            return
        if plan.exit_layer and next_exit(rows, plan) is None:
            plan = replace(plan, exit_layer=None)
        ends = [sorted(row.stopper.ends) for row in rows]
        limits = ProgramLimits(min(plan.num_rounds, max_rounds(len(rows))), deadline, ends, ledger=plan.ledger)
        if any(forced := [most_forced(row, plan.most_forced) for row in rows]):
            limits = limits._replace(most_forced=forced)
        if texts:
            others = [(source, one.address) for source, one in texts[0].others]
            limits = limits._replace(indices=[one.own.address for one in texts], others=others, table=table_of(plan))
        yield from self._executed(rows, plan, limits)

    def round(self, rows: list[Sequence], draft: RoundDraft) -> RoundOutput:
        """Run one round in one call; see `Executor.round`."""
        plan, given = draft.plan, None if draft.given is None else [one.token_ids for one in draft.given]
        keeps = any(row.request.keep_logits for row in rows)
        hidden_states = self._hidden_state_buffers(rows, plan) if keeps or plan.shadow is not None else None
        penalties = None if hidden_states is None else Penalties.of(rows, self.split.vocab_size, self.split.device)
        limits = ProgramLimits(1, 0.0, [()] * len(rows))
        states = None if hidden_states is None else states_of(self.split, rows)
        output = next(self._executed(rows, plan, limits, given, hidden_states))
        if draft.given is not None:
            output.exit_layer = LOOKUP
            draft.add_matches(output.rows)
        if hidden_states is not None and keeps:
            _add_logits(output.rows, hidden_states, penalties)
        if hidden_states is not None and plan.shadow is not None:
            output.seconds.restart()
            taps, logits = [hidden_states.hidden], hidden_states.logits
            counts = [row.num_drafted + 1 for row in output.rows]
            finals = None if hidden_states.finals is None else hidden_states.finals[: sum(counts)]
            last = before_each(states, finals, counts)
            add_shadow_picks(self.split, self.picker, plan.shadow, output.rows, taps, logits, penalties, last)
            output.seconds.lap("shadow")
        return output

    def _executed(
        self,
        rows: list[Sequence],
        plan: Plan,
        limits: ProgramLimits,
        given: abc.Sequence[abc.Sequence[int]] | None = None,
        hidden_states: HiddenStateBuffers | None = None,
    ) -> Iterator[RoundOutput]:
        assert self._rounds is not None
        seconds = self.new_seconds()
        begin, capacities = seconds.now(), [row.num_remaining - 1 for row in rows]
        lengths = [0] * len(rows)
        if plan.exit_layer and given is None:
            lengths = [min(length, most) for length, most in zip(plan.draft_lengths, capacities, strict=True)]
        drafter = self._drafter(plan, rows) if plan.exit_layer and given is None else None
        spans = [Span(row.pages, row.num_tokens - 1, n) for row, n in zip(rows, lengths, strict=True)]
        last, params = [row.token_ids[-1] for row in rows], packed_params([row.request.params for row in rows])
        data = PickData.of(rows, self.split.vocab_size)
        grammars, finals = ProgramGrammars.of(rows), states_of(self.split, rows)
        if drafter is not None and drafter.exit_head is not None and finals is None:
            drafter = drafter._replace(exit_head=None)  # another thread has removed the heads
        results = self._rounds.run(
            self.cache, spans, last, params, capacities, drafter, limits, given, hidden_states, data, grammars, finals
        )
        if finals is not None:
            for at, row in enumerate(rows):
                num_new = sum([len(result.rows[at].token_ids) for result in results])
                row.final_state, row.final_at = finals[at].clone(), row.num_tokens + num_new - 2
        inside = sum([sum(result.draft_seconds) + sum(result.verify_seconds) for result in results])
        overhead = seconds.now() - begin - inside
        for result in results:
            _add_stages(seconds, result, overhead)
            is_found = any(row.match_length for row in result.rows)
            has_drafted = any(row.drafted or row.withdrawn is not None for row in result.rows)
            exit_layer = LOOKUP if is_found else plan.exit_layer if has_drafted else None
            outputs = [_row_round(*pair) for pair in zip(rows, result.rows, strict=True)]
            yield RoundOutput(exit_layer, outputs, seconds)
            seconds, overhead = self.new_seconds(), 0.0

    def _drafter(self, plan: Plan, rows: list[Sequence]) -> Drafter | None:
        """The layers that draft; None for copies of an exit layer with a trained head, which is not theirs."""
        assert self._rounds is not None and plan.exit_layer is not None
        rounded = plan.draft_bits is not None
        exit_head = self._rounds.body.exit_heads.of(self.split.exit_heads, plan.exit_layer)
        if exit_head is not None and rounded:
            return None
        is_part = any(plan.draft_lengths) and not any(row.needs_vocabulary for row in rows)
        subset = self.split.draft_subset(plan.draft_vocab if is_part else None)
        head = self._rounds.body.draft_head(subset, rounded)
        return Drafter(plan.exit_layer, head, stop_rule_of(plan), plan.reads_confidence, rounded, exit_head)

    def _hidden_state_buffers(self, rows: list[Sequence], plan: Plan) -> HiddenStateBuffers | None:
        """Buffers for hidden states and logits of a round; None if they exceed `MAX_HIDDEN_NUMBERS`."""
        assert self._rounds is not None
        layers = () if plan.shadow is None else plan.shadow.layers
        longest, table = plan.draft_lengths, table_of(plan)
        if table is not None:
            longest = tuple([max(length, *own) for length, own in zip(longest, table.lengths, strict=True)])
        cut = [min(n, row.num_remaining - 1) for n, row in zip(longest, rows, strict=True)]
        has_heads = self.split.exit_heads is not None
        return HiddenStateBuffers.allocate(self._rounds.body, layers, sum([1 + n for n in cut]), has_heads)


def _may_ban_all_tokens(row: Sequence, vocab_size: int) -> bool:
    """Whether `no_repeat_ngram_size` may ban every token. The eager executor raises an error that explains it."""
    params = row.request.params
    if row.grammar is not None:
        return bool(params.no_repeat_ngram_size)
    return bool(params.no_repeat_ngram_size) and not params.is_greedy and row.max_length > vocab_size


@lru_cache(maxsize=64)
def _stop_rule(min_confidence: float, stop: SurvivalStop | None) -> StopRule:
    if stop is None:
        return StopRule(min_confidence)
    return StopRule(0.0, CONFIDENCE_EDGES, *stop)


def stop_rule_of(plan: Plan) -> StopRule:
    """The compiled form of a plan's stop rules. Equal rules give the same object, so that buffers write it once."""
    stop = plan.stop
    return _stop_rule(plan.min_confidence, stop and stop._replace(calibration=tuple(stop.calibration)))


def _add_stages(seconds: StageSeconds, result: RoundResult, overhead: float) -> None:
    """Add the seconds of each stage of a round. `overhead`: seconds outside of the compiled stages."""
    seconds.add("rest", max(0.0, overhead))
    for at, taken in enumerate(result.draft_seconds):
        seconds.add(("draft", "head", "pick")[at % 3], taken)
    stages = ("draft", "verify", "head", "pick")
    for stage, taken in list(zip(stages, result.verify_seconds, strict=True))[result.is_given :]:
        seconds.add(stage, taken)


def _row_round(sequence: Sequence, row: RowResult) -> RowRound:
    drafted, accepted = row.drafted, max(0, len(row.token_ids) - 1)  # no token: it had ended in an earlier round
    return RowRound(
        sequence,
        len(drafted),
        accepted,
        row.token_ids,
        drafted,
        tuple(row.confidences),
        withdrawn=row.withdrawn,
        match_length=row.match_length,
        source=row.source,
        logprobs=row.logprobs,
    )


def _add_logits(outputs: list[RowRound], hidden_states: HiddenStateBuffers, penalties: Penalties | None) -> None:
    """Report logits and filtered scores of rows that keep them."""
    first = 0
    for i, output in enumerate(outputs):
        request = output.sequence.request
        if request.keep_logits:
            output.logits = scores = hidden_states.logits[first : first + len(output.token_ids)].clone()
            if penalties is not None:
                scores = penalties.along([()] * i + [output.token_ids]).applied(scores)
            output.scores = filtered(scores, request.params).clone()
        first += output.num_drafted + 1
