"""`CpuExecutor`: the rounds of a plan in one compiled call, bit for bit as the eager executor runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from selfspec.control.plan import CONFIDENCE_EDGES, LOOKUP, Plan, SurvivalStop
from selfspec.control.rows import StageSeconds
from selfspec.drafting.compiled_prompt_lookup import CompiledLookup
from selfspec.executors.after_round import with_shadows
from selfspec.executors.cpu.body import CompiledBody
from selfspec.executors.cpu.buffers import Beside, Done, Drafter, Further, Judged, Seen, Stops
from selfspec.executors.cpu.rounds import CompiledRounds, most_rounds
from selfspec.executors.cpu.told import Told
from selfspec.executors.penalties import Penalties
from selfspec.executors.pick import filtered
from selfspec.executors.picker import Picker, told_of
from selfspec.executors.program import Executed, Executor, RoundDraft, next_exit
from selfspec.executors.rows import Row
from selfspec.executors.verdict import Verdict
from selfspec.model.kv_cache import PagedCache, Span, Tree
from selfspec.model.stack import Stack


class CpuExecutor(Executor):
    """Runs compiled code, where the stack's layers are compiled.

    A program is one call, up to the number of rounds that its buffers hold. Rounds that look at layers or keep logits,
    and drafts from a corpus, are a call each.
    """

    def __init__(
        self, stack: Stack, cache: PagedCache, picker: Picker, new_seconds: Callable[[], StageSeconds] = StageSeconds
    ) -> None:
        super().__init__(stack, cache, picker, new_seconds)
        body = stack.compiled if picker.is_compiled and stack.runner is None else None
        self._rounds = CompiledRounds(body) if isinstance(body, CompiledBody) else None

    def serves(self, rows: Sequence[Row], plan: Plan) -> bool:
        if self._rounds is None or plan.keep_divergence or any(row.request.logits_processor for row in rows):
            return False
        if any(_may_ban_all(row, self.stack.vocab_size) for row in rows):
            return False
        if plan.exit_layer and self._drafter(plan) is None:
            return False
        keeps = any(row.request.keep_logits for row in rows)
        return not (keeps or plan.shadow is not None) or self._seen(rows, plan) is not None

    def run(self, rows: Sequence[Row], plan: Plan, deadline: float) -> Iterator[Executed]:
        table, looks_up = plan.table, plan.table is not None
        keeps = any(row.request.keep_logits for row in rows)
        if keeps or plan.shadow is not None or (looks_up and any(row.lookup.has_corpus for row in rows)):
            yield from super().run(rows, plan, deadline)
            return
        if plan.exit_layer and next_exit(rows, plan) is None:
            plan = replace(plan, exit_layer=None)
        indices = None
        if looks_up:
            own = [row.lookup.own for row in rows]
            indices = [one.address for one in own if isinstance(one, CompiledLookup)]
        ends = [sorted(row.stopper.ends) for row in rows]
        further = Further(min(plan.num_rounds, most_rounds(len(rows))), deadline, ends, indices, table)
        yield from self._executed(rows, plan, further)

    def round(self, rows: Sequence[Row], draft: RoundDraft) -> Executed:
        plan, given = draft.plan, None if draft.given is None else [guess.tokens for guess in draft.given]
        keeps = any(row.request.keep_logits for row in rows)
        seen = self._seen(rows, plan) if keeps or plan.shadow is not None else None
        penalties = None if seen is None else Penalties.of(rows, self.stack.vocab_size, self.stack.device)
        further = Further(1, 0.0, [()] * len(rows))
        executed = next(self._executed(rows, plan, further, given, seen))
        verdicts, seconds = executed.verdicts, executed.seconds
        verdicts = draft.with_matches(verdicts)
        if seen is not None and keeps:
            verdicts = _with_logits(rows, verdicts, seen, penalties)
        if seen is not None and plan.shadow is not None:
            seconds.restart()
            taps, logits = [seen.hidden], seen.logits
            verdicts = with_shadows(self.stack, self.picker, rows, plan, verdicts, taps, logits, penalties)
            seconds.lap("shadow")
        return Executed(executed.exit_layer if draft.given is None else LOOKUP, verdicts, seconds)

    def _executed(
        self,
        rows: Sequence[Row],
        plan: Plan,
        further: Further,
        given: Sequence[Sequence[int]] | None = None,
        seen: Seen | None = None,
    ) -> Iterator[Executed]:
        assert self._rounds is not None
        seconds = self.new_seconds()
        begin, rooms = seconds.now(), [row.room - 1 for row in rows]
        lengths = [0] * len(rows)
        if plan.exit_layer and given is None:
            lengths = [min(length, room) for length, room in zip(plan.draft_lengths, rooms, strict=True)]
        drafter = self._drafter(plan) if plan.exit_layer and given is None else None
        spans = [Span(row.pages, len(row.content) - 1, n) for row, n in zip(rows, lengths, strict=True)]
        last, how = [row.content[-1] for row in rows], told_of([row.request.sampling for row in rows])
        told = Told.of(rows, self.stack.vocab_size)
        done = self._rounds.run(self.cache, spans, last, how, rooms, drafter, further, given, seen, told)
        around = seconds.now() - begin - sum([sum(one.steps) + sum(one.taken) for one in done])
        for one in done:
            _add_stages(seconds, one, around)
            is_found, has_drafted = any(row.match for row in one.rows), any(row.drafted for row in one.rows)
            exit_layer = LOOKUP if is_found else plan.exit_layer if has_drafted else None
            yield Executed(exit_layer, [_verdict(row) for row in one.rows], seconds)
            seconds, around = self.new_seconds(), 0.0

    def _drafter(self, plan: Plan) -> Drafter | None:
        """Who drafts; None where that is not compiled."""
        assert self._rounds is not None and plan.exit_layer is not None
        heads, rounded = self.stack.exit_heads, plan.draft_bits is not None
        if heads is not None and plan.exit_layer in heads.layers:
            return None
        subset = self.stack.draft_subset(plan.draft_vocab if any(plan.draft_lengths) else None)
        head = self._rounds.body.draft_head(subset, rounded)
        rule = plan.second_choices
        beside = rule and _beside(tuple(rule.right), tuple(rule.second), *rule[2:])
        return Drafter(plan.exit_layer, head, stops_of(plan), plan.reads_confidence, rounded, beside)

    def _seen(self, rows: Sequence[Row], plan: Plan) -> Seen | None:
        """Where a round leaves hidden states and logits; None where that is much."""
        assert self._rounds is not None
        layers = () if plan.shadow is None else plan.shadow.layers
        beside = 0 if plan.second_choices is None else plan.second_choices.most
        longest = plan.draft_lengths
        if plan.table is not None:
            longest = tuple([max(length, *own) for length, own in zip(longest, plan.table.lengths, strict=True)])
        cut = [min(n, row.room - 1) for n, row in zip(longest, rows, strict=True)]
        return Seen.of(self._rounds.body, layers, sum([1 + n + min(beside, n) for n in cut]))


def _may_ban_all(row: Row, vocab_size: int) -> bool:
    """Whether no token may be left to be sampled, which the eager executor refuses in words."""
    sampling = row.request.sampling
    return sampling.no_repeat_ngram_size > 0 < sampling.temperature and len(row.content) + row.room > vocab_size


@lru_cache(maxsize=64)
def _beside(right: Sequence[float], second: Sequence[float], least: float, most: int, enough: float) -> Beside:
    """The same object of equal rules, see `SecondChoices`."""
    return Beside(CONFIDENCE_EDGES, right, second, least, enough, most)


@lru_cache(maxsize=64)
def _stops(min_confidence: float, stop: SurvivalStop | None) -> Stops:
    if stop is None:
        return Stops(min_confidence)
    return Stops(0.0, CONFIDENCE_EDGES, stop.calibration, stop.least)


def stops_of(plan: Plan) -> Stops:
    """Where a plan's rows end their drafts, as compiled functions are told; the same object of equal plans."""
    stop = plan.stop
    return _stops(plan.min_confidence, stop and SurvivalStop(tuple(stop.calibration), stop.least))


def _add_stages(seconds: StageSeconds, one: Done, around: float) -> None:
    """What a round took, piece by piece."""
    seconds.add("rest", max(0.0, around))
    for at, taken in enumerate(one.steps):
        seconds.add(("draft", "head", "pick")[at % 3], taken)
    stages = ("draft", "verify", "head", "pick")
    for stage, taken in list(zip(stages, one.taken, strict=True))[one.is_given :]:
        seconds.add(stage, taken)


def _verdict(one: Judged) -> Verdict:
    tree = None if one.parents is None else Tree((-1, *one.parents))
    chain = 0 if tree is None else one.chain
    sure, match, logprobs = tuple(one.sure), one.match, one.logprobs
    return Verdict(one.drafted, one.path, one.block, None, None, tree, chain, sure, match=match, logprobs=logprobs)


def _with_logits(
    rows: Sequence[Row], verdicts: Sequence[Verdict], seen: Seen, penalties: Penalties | None
) -> list[Verdict]:
    """With the logits of rows that keep them, and what their tokens were picked from."""
    out, at = [], 0
    for i, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        if row.request.keep_logits:
            raw = scores = seen.logits[[at + node for node in verdict.path]]
            if penalties is not None:
                scores = penalties.along([()] * i + [verdict.block]).applied(raw)
            verdict = verdict._replace(logits=raw, scores=filtered(scores, row.request.sampling).clone())
        out.append(verdict)
        at += len(verdict.drafted) + 1
    return out
