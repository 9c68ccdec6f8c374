"""`CpuExecutor`: runs the rounds of a plan in one compiled call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from selfspec.control.plan import CONFIDENCE_EDGES, LOOKUP, Plan, SurvivalStop
from selfspec.control.rows import StageSeconds
from selfspec.executors.after_round import with_shadows
from selfspec.executors.cpu.body import CompiledBody
from selfspec.executors.cpu.buffers import (
    Drafter,
    HiddenStateBuffers,
    ProgramLimits,
    RoundResult,
    RowResult,
    SecondChoiceRule,
    StopRule,
)
from selfspec.executors.cpu.pick_data import PickData
from selfspec.executors.cpu.rounds import CompiledRounds, max_rounds
from selfspec.executors.penalties import Penalties
from selfspec.executors.picker import Picker, packed_samplings
from selfspec.executors.program import Executed, Executor, RoundDraft, next_exit
from selfspec.executors.rows import Row
from selfspec.executors.verdict import Verdict
from selfspec.kernels.pick import filtered
from selfspec.model.kv_cache import PagedCache, Span, Tree
from selfspec.model.stack import Stack


class CpuExecutor(Executor):
    """Runs plans by compiled code; it serves stacks whose layers are compiled. Picks equal the eager executor's.

    One call runs a whole program, up to the number of rounds that its buffers hold. Rounds with a probe and rounds that
    keep logits take one call each.
    """

    def __init__(
        self, stack: Stack, cache: PagedCache, picker: Picker, new_seconds: Callable[[], StageSeconds] = StageSeconds
    ) -> None:
        super().__init__(stack, cache, picker, new_seconds)
        body = stack.compiled if picker.is_compiled and stack.runner is None else None
        self._rounds = CompiledRounds(body) if isinstance(body, CompiledBody) else None

    def serves(self, rows: Sequence[Row], plan: Plan) -> bool:
        """Whether the plan can run in compiled code; see `Executor.serves`."""
        if self._rounds is None or plan.keep_divergence or any(row.request.logits_processor for row in rows):
            return False
        if any(_may_ban_all_tokens(row, self.stack.vocab_size) for row in rows):
            return False
        if plan.exit_layer and self._drafter(plan) is None:
            return False
        keeps = any(row.request.keep_logits for row in rows)
        return not (keeps or plan.shadow is not None) or self._hidden_state_buffers(rows, plan) is not None

    def run(self, rows: Sequence[Row], plan: Plan, deadline: float) -> Iterator[Executed]:
        """Run the rounds of a plan, in one call if possible; see `Executor.run`."""
        keeps = any(row.request.keep_logits for row in rows)
        lookups = [] if plan.table is None else [row.lookup.compiled() for row in rows]
        texts = [one for one in lookups if one is not None]  # held as long as the program runs
        if keeps or plan.shadow is not None or len(texts) < len(lookups):
            yield from super().run(rows, plan, deadline)
            return
        if plan.exit_layer and next_exit(rows, plan) is None:
            plan = replace(plan, exit_layer=None)
        ends = [sorted(row.stopper.ends) for row in rows]
        limits = ProgramLimits(min(plan.num_rounds, max_rounds(len(rows))), deadline, ends)
        if texts:
            others = [(source, one.address) for source, one in texts[0].others]
            limits = limits._replace(indices=[one.own.address for one in texts], others=others, table=plan.table)
        yield from self._executed(rows, plan, limits)

    def round(self, rows: Sequence[Row], draft: RoundDraft) -> Executed:
        """Run one round in one call; see `Executor.round`."""
        plan, given = draft.plan, None if draft.given is None else [guess.tokens for guess in draft.given]
        keeps = any(row.request.keep_logits for row in rows)
        hidden_states = self._hidden_state_buffers(rows, plan) if keeps or plan.shadow is not None else None
        penalties = None if hidden_states is None else Penalties.of(rows, self.stack.vocab_size, self.stack.device)
        limits = ProgramLimits(1, 0.0, [()] * len(rows))
        executed = next(self._executed(rows, plan, limits, given, hidden_states))
        verdicts, seconds = executed.verdicts, executed.seconds
        verdicts = draft.with_matches(verdicts)
        if hidden_states is not None and keeps:
            verdicts = _with_logits(rows, verdicts, hidden_states, penalties)
        if hidden_states is not None and plan.shadow is not None:
            seconds.restart()
            taps, logits = [hidden_states.hidden], hidden_states.logits
            verdicts = with_shadows(self.stack, self.picker, rows, plan, verdicts, taps, logits, penalties)
            seconds.lap("shadow")
        return Executed(executed.exit_layer if draft.given is None else LOOKUP, verdicts, seconds)

    def _executed(
        self,
        rows: Sequence[Row],
        plan: Plan,
        limits: ProgramLimits,
        given: Sequence[Sequence[int]] | None = None,
        hidden_states: HiddenStateBuffers | None = None,
    ) -> Iterator[Executed]:
        assert self._rounds is not None
        seconds = self.new_seconds()
        begin, rooms = seconds.now(), [row.room - 1 for row in rows]
        lengths = [0] * len(rows)
        if plan.exit_layer and given is None:
            lengths = [min(length, room) for length, room in zip(plan.draft_lengths, rooms, strict=True)]
        drafter = self._drafter(plan) if plan.exit_layer and given is None else None
        spans = [Span(row.pages, len(row.content) - 1, n) for row, n in zip(rows, lengths, strict=True)]
        last, how = [row.content[-1] for row in rows], packed_samplings([row.request.sampling for row in rows])
        data = PickData.of(rows, self.stack.vocab_size)
        results = self._rounds.run(self.cache, spans, last, how, rooms, drafter, limits, given, hidden_states, data)
        inside = sum([sum(result.draft_seconds) + sum(result.verify_seconds) for result in results])
        overhead = seconds.now() - begin - inside
        for result in results:
            _add_stages(seconds, result, overhead)
            is_found, has_drafted = any(row.match for row in result.rows), any(row.drafted for row in result.rows)
            exit_layer = LOOKUP if is_found else plan.exit_layer if has_drafted else None
            yield Executed(exit_layer, [_verdict(row) for row in result.rows], seconds)
            seconds, overhead = self.new_seconds(), 0.0

    def _drafter(self, plan: Plan) -> Drafter | None:
        """The layers that draft; None for copies of an exit layer with a trained head, which is not theirs."""
        assert self._rounds is not None and plan.exit_layer is not None
        rounded = plan.draft_bits is not None
        exit_head = self._rounds.body.exit_heads.of(self.stack.exit_heads, plan.exit_layer)
        if exit_head is not None and rounded:
            return None
        subset = self.stack.draft_subset(plan.draft_vocab if any(plan.draft_lengths) else None)
        head = self._rounds.body.draft_head(subset, rounded)
        rule = plan.second_choices
        second_choices = rule and _second_choice_rule(tuple(rule.right), tuple(rule.second), *rule[2:])
        stop = stop_rule_of(plan)
        return Drafter(plan.exit_layer, head, stop, plan.reads_confidence, rounded, second_choices, exit_head)

    def _hidden_state_buffers(self, rows: Sequence[Row], plan: Plan) -> HiddenStateBuffers | None:
        """Buffers for hidden states and logits of a round; None if they exceed `MAX_HIDDEN_NUMBERS`."""
        assert self._rounds is not None
        layers = () if plan.shadow is None else plan.shadow.layers
        num_second = 0 if plan.second_choices is None else plan.second_choices.most
        longest = plan.draft_lengths
        if plan.table is not None:
            longest = tuple([max(length, *own) for length, own in zip(longest, plan.table.lengths, strict=True)])
        cut = [min(n, row.room - 1) for n, row in zip(longest, rows, strict=True)]
        return HiddenStateBuffers.allocate(self._rounds.body, layers, sum([1 + n + min(num_second, n) for n in cut]))


def _may_ban_all_tokens(row: Row, vocab_size: int) -> bool:
    """Whether `no_repeat_ngram_size` may ban every token. The eager executor raises an error that explains it."""
    sampling = row.request.sampling
    return sampling.no_repeat_ngram_size > 0 < sampling.temperature and len(row.content) + row.room > vocab_size


@lru_cache(maxsize=64)
def _second_choice_rule(
    right: Sequence[float], second: Sequence[float], least: float, most: int, enough: float
) -> SecondChoiceRule:
    """The compiled form of `SecondChoices`. Equal rules give the same object, so that buffers write it once."""
    return SecondChoiceRule(CONFIDENCE_EDGES, right, second, least, enough, most)


@lru_cache(maxsize=64)
def _stop_rule(min_confidence: float, stop: SurvivalStop | None) -> StopRule:
    if stop is None:
        return StopRule(min_confidence)
    return StopRule(0.0, CONFIDENCE_EDGES, stop.calibration, stop.least)


def stop_rule_of(plan: Plan) -> StopRule:
    """The compiled form of a plan's stop rules. Equal rules give the same object, so that buffers write it once."""
    stop = plan.stop
    return _stop_rule(plan.min_confidence, stop and SurvivalStop(tuple(stop.calibration), stop.least))


def _add_stages(seconds: StageSeconds, result: RoundResult, overhead: float) -> None:
    """Add the seconds of each stage of a round. `overhead`: seconds outside of the compiled stages."""
    seconds.add("rest", max(0.0, overhead))
    for at, taken in enumerate(result.draft_seconds):
        seconds.add(("draft", "head", "pick")[at % 3], taken)
    stages = ("draft", "verify", "head", "pick")
    for stage, taken in list(zip(stages, result.verify_seconds, strict=True))[result.is_given :]:
        seconds.add(stage, taken)


def _verdict(row: RowResult) -> Verdict:
    tree = None if row.parents is None else Tree((-1, *row.parents))
    chain = 0 if tree is None else row.chain
    verdict = Verdict(row.drafted, row.path, row.block, None, None, tree, chain, tuple(row.sure))
    return verdict._replace(match=row.match, source=row.source, logprobs=row.logprobs)


def _with_logits(
    rows: Sequence[Row], verdicts: Sequence[Verdict], hidden_states: HiddenStateBuffers, penalties: Penalties | None
) -> list[Verdict]:
    """The verdicts, with the logits and filtered scores of rows that keep them."""
    out, first_node = [], 0
    for i, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        if row.request.keep_logits:
            raw = scores = hidden_states.logits[[first_node + node for node in verdict.path]]
            if penalties is not None:
                scores = penalties.along([()] * i + [verdict.block]).applied(raw)
            verdict = verdict._replace(logits=raw, scores=filtered(scores, row.request.sampling).clone())
        out.append(verdict)
        first_node += len(verdict.drafted) + 1
    return out
