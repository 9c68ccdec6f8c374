"""`Engine`: rows join and leave between programs; `step` is admit, prefill, plan, run, observe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from selfspec.control.plan import Plan, Policy
from selfspec.control.rows import RoundOutcome, RowOutcome, StageSeconds
from selfspec.decoding.checked import CheckedPolicy
from selfspec.decoding.policy_choice import Decodable, policy_for
from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.decoding.prompt_chunks import chunks_for
from selfspec.decoding.request import Completion, Request
from selfspec.decoding.results import Round, RowResult
from selfspec.decoding.row import Row
from selfspec.decoding.scheduler import Scheduler
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.responses import Responses
from selfspec.errors import flag, is_number, whole
from selfspec.executors.after_round import Teach
from selfspec.executors.picker import Picker
from selfspec.executors.program import Executed
from selfspec.executors.select import executors_for
from selfspec.executors.verdict import Verdict
from selfspec.model.draft_vocabulary import Part
from selfspec.model.refusals import refuse_autocast
from selfspec.model.stack import Stack
from selfspec.progress import report

DEFAULT_ROW_TOKENS = 2048  # cached tokens per row when the caller names no budget
CUDA_PAGE_SIZE = 64
DEADLINE = 1 / 30  # seconds of a program that somebody watches: what is streamed still seems to flow


class Learns(Protocol):
    """Who is told where drafts were refused, and may change exit heads between rounds; see `selfspec.learn`."""

    @property
    def take(self) -> Teach: ...
    def follow(self, stack: Stack) -> None: ...
    def after(self, num_ended: int, seconds: float) -> None: ...


def page_size_of(stack: Stack) -> int:
    """Tokens of a small page: as many as the stack's attention backend can read pages of."""
    return max(CUDA_PAGE_SIZE, stack.backend.page_multiple)


class Engine:
    """Decodes requests in a running batch whose rows join and leave between programs.

    Args:
        target: an opened model, see `selfspec.target.Target`.
        policy: a name, or a `selfspec.Policy`; default: `adaptive`, or `fixed` where an exit layer or a
            draft length is named.
        drafts: where those of `adaptive` may come from, some of `control.plan.DRAFTS`; default: all.
        max_batch_size: rows decoded together; more wait their turn.
        max_cached_tokens: tokens whose keys and values fit at once, over all rows; rows wait until theirs fit. A row
            takes pages for its prompt and all it may emit when it joins, so that it can never run out half-way.
        page_size: tokens a page holds; default: 64, or what the attention backend asks for; on CPU without a prefix
            cache a row's equal share, since its keys are then one contiguous view.
        prefill_chunk: most prompt tokens read per step, so that long prompts do not hold up running rows. On CUDA, they
            are also at most as many as take a thirtieth of a second while other rows decode.
        learn: a `selfspec.learn.Learner` of this target, which improves its exit heads between rounds.
        datastore: an open `selfspec.drafting.datastore.Datastore` of the target's tokenizer: where `adaptive` drafts by
            lookup, texts of the corpus continue a row, too.
        responses: finished responses, in which lookup finds drafts and to which those of this engine are added; several
            engines may share them. None: no request's text is used for another one.
        exact: speculation equals plain decoding bit for bit in any number format, and no row depends on its neighbours;
            see `Target.exact_stack`.
        burst: seconds after which no further round of a program begins, where its plan names no deadline; default: a
            thirtieth, and the program with a row's first token has one round.
        prefix_cache: keep keys and values of prompts and outputs until other requests need their memory: a prompt that
            begins as one of them does is read from where it differs. With compiled layers and in exact mode these are
            the same bits, else the same up to rounding. Or the `PrefixCache` of an earlier engine of the same target
            that has ended, whose pages are then used, instead of `max_cached_tokens`.

    Raises:
        ValueError: an argument is out of range; a `DatastoreError` where the datastore holds tokens that the model does
            not know.
    """

    def __init__(
        self,
        target: Decodable,
        *,
        policy: str | Policy | None = None,
        exit_layer: int | None = None,
        num_draft_tokens: int | None = None,
        drafts: Sequence[str] | None = None,
        max_batch_size: int = 8,
        max_cached_tokens: int | None = None,
        page_size: int | None = None,
        prefill_chunk: int = 512,
        learn: Learns | None = None,
        datastore: Datastore | None = None,
        responses: Responses | None = None,
        exact: bool = False,
        burst: float | None = None,
        prefix_cache: bool | PrefixCache = False,
    ) -> None:
        if burst is not None and not (is_number(burst) and burst >= 0):
            raise ValueError(f"burst must be a number of seconds, at least 0, got {burst!r}")
        whole("max_batch_size", max_batch_size, 1)
        whole("prefill_chunk", prefill_chunk, 1)
        flag("exact", exact)
        prefix = prefix_cache if isinstance(prefix_cache, PrefixCache) else None
        has_prefixes = prefix is not None or flag("prefix_cache", prefix_cache)
        self.target, self.exact = target, exact
        self.stack = target.exact_stack if exact else target.stack
        refuse_autocast(self.stack.device)
        self.frequencies = self.stack.frequencies
        """Of the tokens that it reads and writes."""
        if max_cached_tokens is None:
            max_cached_tokens = max_batch_size * min(self.stack.context_limit, DEFAULT_ROW_TOKENS)
        if page_size is None:
            share = max(1, max_cached_tokens // max_batch_size)
            is_whole = self.stack.device.type == "cpu" and not has_prefixes
            page_size = share if is_whole else min(share, page_size_of(self.stack))
        if max_cached_tokens < page_size:
            raise ValueError(f"max_cached_tokens must hold a page of {page_size} tokens, got {max_cached_tokens}")
        if learn is not None and self.stack.ranks is not None:
            raise ValueError("learn works by the clock of one process, got a model that is spread over several")
        if learn is not None:
            learn.follow(target.stack)
        self.learn = learn
        chosen = policy_for(target, policy, exit_layer, num_draft_tokens, max_batch_size, drafts, exact)
        self._checked = CheckedPolicy(chosen, self.stack.num_layers)
        if datastore is not None:
            datastore.check_fits(self.stack.vocab_size)
        self.max_batch_size, self.prefill_chunk = max_batch_size, prefill_chunk
        self.chunks = chunks_for(self.stack, prefill_chunk)
        """How many of the prompts' tokens are read between two programs."""
        if has_prefixes and prefix is None:
            prefix = PrefixCache(self.stack.new_cache(max_cached_tokens // page_size, page_size), self.stack)
        self._prefix = prefix
        self.cache = self.stack.new_cache(max_cached_tokens // page_size, page_size) if prefix is None else prefix.cache
        self.rows: list[Row] = []
        self._picker = Picker(self.stack)
        self._responses = responses
        texts = tuple([one for one in (responses, datastore) if one is not None])
        self._scheduler = Scheduler(target, self.stack, self.cache, texts, prefix)
        self._cancelled: set[int] = set()
        # Not handed out yet; they outlive a step that raises:
        self._results: list[RowResult] = []  # of a round that has not ended
        self._rounds: list[Round] = []
        self._wasted = 0  # tokens of that round beyond the end of a row
        self._is_watched, self._deadline = burst is None, DEADLINE if burst is None else burst
        self._executors = executors_for(self.stack, self.cache, self._picker, None if learn is None else learn.take)
        self._round_seconds = 0.0  # of the last round

    @property
    def policy(self) -> Policy:
        """Who plans."""
        return self._checked.policy

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler)

    @property
    def num_pages_in_use(self) -> int:
        """Pages of `cache` that running rows hold; of `cache.num_pages`."""
        num_idle = 0 if self._prefix is None else self._prefix.num_idle_pages
        return self.cache.num_pages - self.cache.num_free_pages - num_idle

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens that were looked up in the prefix cache."""
        return 0 if self._prefix is None else self._prefix.num_queried

    @property
    def prefix_hits(self) -> int:
        """Prompt tokens that the prefix cache had, and that were not read again."""
        return 0 if self._prefix is None else self._prefix.num_found

    @property
    def has_work(self) -> bool:
        return bool(self.rows or self._scheduler or self._results or self._rounds)

    def submit(self, prompt: str | Sequence[int] | Request, **options: Any) -> int:
        """Queue a prompt; returns its request id. Options are those of `decoding.request.Options`.

        Raises:
            ValueError: the prompt is empty or longer than the context, or an option is out of range.
            CacheFullError: the request could never fit into `max_cached_tokens`.
        """
        return self._scheduler.submit(prompt, options)

    def cancel(self, request_id: int) -> None:
        """End a request; its pages are free from the next step on. Finished or unknown requests are left alone."""
        if any(row.request_id == request_id for row in self.rows) or request_id in self._scheduler:
            self._cancelled.add(request_id)

    def step(self) -> list[Round]:
        """Admit what fits, read at most `prefill_chunk` prompt tokens, and run one program of the ready rows.

        What a caller's processor, criterion or policy raises comes out here. No other row suffers: what it got is
        reported by the next step. A row whose own processor or criterion raised is cancelled.

        Returns:
            the program's rounds, at least one; of a step that decoded nothing, one without a plan.
        """
        refuse_autocast(self.stack.device)
        clock = StageSeconds()
        self._drop_ended()
        if self._cancelled:
            self._drop_cancelled()
        with torch.inference_mode():
            self._admit()
            if any(not row.is_read for row in self.rows):
                self.chunks.measured(self._read_prompts)
            self._scheduler.publish(self.rows)
        clock.lap("prefill")
        ready = [row for row in self.rows if row.is_read]
        if ready:
            self._run(ready, clock)
        elif self._results or not self._rounds:
            num_read = sum([row.num_cached for row in self.rows])
            report("%d of %d tokens", num_read, sum([len(row.content) - 1 for row in self.rows]))
            self._end_round(None, None, clock, 0)
        rounds = self._rounds
        if self.learn is not None:
            clock.restart()
            num_ended = sum(row.completion is not None for round_ in rounds for row in round_.rows)
            self.learn.after(num_ended, sum(round_.seconds.total for round_ in rounds))
            clock.lap("control")
            rounds[-1].seconds.control += clock.control
        self._rounds = []
        return rounds

    def _run(self, rows: Sequence[Row], clock: StageSeconds) -> None:
        """A program of these rows: what to run, running it, and what came of it."""
        plan, deadline = self._bounded(self._checked.plan(rows), rows)
        part = self._part(plan, rows)
        clock.lap("control")
        executor = next(one for one in self._executors if one.serves(rows, plan))
        outcomes = list[RoundOutcome]()
        try:
            for executed in executor.run(rows, plan, deadline):
                if all(row.has_ended for row in rows):  # by stop strings, which compiled programs know nothing of
                    self._waste(executed)
                    continue
                outcomes.append(self._take(rows, executed, part))
                executed.seconds.prefill += clock.prefill
                executed.seconds.control += clock.control
                clock = StageSeconds()
                self._end_round(plan, executed.exit_layer, executed.seconds, len(outcomes) - 1)
        finally:
            self._drop_ended()
            if outcomes:  # of one that raised, those that ended before
                self._observe(plan, outcomes)

    def _observe(self, plan: Plan, outcomes: Sequence[RoundOutcome]) -> None:
        clock = StageSeconds()
        self._checked.observe(plan, outcomes)
        clock.lap("control")
        outcomes[-1].seconds.control += clock.control
        self._round_seconds = outcomes[-1].seconds.total

    def _bounded(self, plan: Plan, rows: Sequence[Row]) -> tuple[Plan, float]:
        """The plan with as many rounds as may be run at once, and the seconds after which no further one begins."""
        deadline = self._deadline if plan.deadline is None else plan.deadline
        if any(row.request.stop or row.request.stopping_criteria for row in rows):
            deadline = min(deadline, DEADLINE)  # where they end, what was decoded beyond is in vain
        most = plan.num_rounds if len(rows) == len(self.rows) else 1  # others wait for their prompts to be read
        if self._is_watched and any(len(row.content) == row.num_prompt_tokens for row in rows):
            most = 1  # a first token is waited for, and tokens are handed out after a program
        if self.stack.ranks is not None:  # clocks differ between ranks
            in_time = deadline / self._round_seconds if self._round_seconds else 1
            most, deadline = self.stack.agreed(max(1, int(min(most, in_time)))), math.inf
        return (plan if most == plan.num_rounds else replace(plan, num_rounds=most)), deadline

    def _take(self, rows: Sequence[Row], executed: Executed, part: Part | None) -> RoundOutcome:
        """Give rows the tokens of a round; rows that a stop string ended before get none of it."""
        start = executed.seconds.now()
        outcomes = list[RowOutcome]()
        for row, verdict in zip(rows, executed.verdicts, strict=True):
            if row.finish_reason is not None:
                self._wasted += len(verdict.block)
                continue
            is_left_out = part is not None and bool(executed.exit_layer) and _is_left_out(part, verdict)
            try:
                result = self._apply(row, verdict)
                self._results += [result]  # no call, after which an interrupt would be taken for one before
            except BaseException:  # of a criterion; or an interrupt, after which nobody knows what the row has taken
                row.has_raised = True
                raise
            outcomes.append(verdict.outcome(row.request_id, result.num_accepted, is_left_out))
        executed.seconds.rest += executed.seconds.now() - start
        return RoundOutcome(executed.exit_layer, outcomes, executed.seconds)

    def _waste(self, executed: Executed) -> None:
        """A round that no row was left for; it is counted with the one before."""
        last = self._rounds[-1]
        tokens = sum([len(verdict.block) for verdict in executed.verdicts])
        last.seconds.rest += executed.seconds.total
        self._rounds[-1] = last._replace(num_wasted=last.num_wasted + tokens)

    def _end_round(self, plan: Plan | None, exit_layer: int | None, seconds: StageSeconds, at: int) -> None:
        round_ = Round(self._results, plan, seconds, exit_layer, at, self._wasted)
        self._rounds += [round_]
        self._results, self._wasted = [], 0  # no call in between, after which an interrupt would have them told twice

    def _drop_ended(self) -> None:
        """Rows that ended, or whose own code raised, leave: after a program, or before the next after an interrupt."""
        for row in self.rows:
            if row.has_raised:
                self._cancel(row)
        self.rows = [row for row in self.rows if row.finish_reason is None]

    def run(self) -> Iterator[Round]:
        """Rounds until nothing is left to do."""
        while self.has_work:
            yield from self.step()

    def leave(self) -> None:
        """Give back the pages of all rows. Nothing may be done with the engine after that."""
        with torch.inference_mode():
            for row in self.rows:
                if row.has_pages:
                    self._scheduler.release(row)
                    row.has_pages = False
        self.rows = []

    def _admit(self) -> None:
        for row in self._scheduler.admitted(self.max_batch_size - len(self.rows)):
            self.rows.append(row)
            self.frequencies.add(row.request.prompt[row.num_cached :])
            self.stack.refresh()  # a row is decoded by the weights as they are when it joins

    def _read_prompts(self) -> int:
        """Read a chunk of the prompts; returns the number of its tokens."""
        readers = self._scheduler.readers(self.rows)
        before = sum([row.num_cached for row in readers])
        are_waiting = any(row.is_read for row in self.rows)  # for their next round
        most = self.stack.agreed(self.chunks.size()) if are_waiting else self.prefill_chunk
        self._executors[-1].prefill(readers, most, self.policy)
        return sum([row.num_cached for row in readers]) - before

    def _part(self, plan: Plan, rows: Sequence[Row]) -> Part | None:
        """The part of the vocabulary that layers draft over; None: all of it, or no layer drafts."""
        if plan.draft_vocab is None or not plan.exit_layer or not self.stack.has_draft_heads:
            return None
        if plan.draft_vocab >= self.stack.vocab_size or any(row.request.logits_processor for row in rows):
            return None
        return self.frequencies.part(plan.draft_vocab)

    def _apply(self, row: Row, verdict: Verdict) -> RowResult:
        emitted = len(row.content) - row.num_prompt_tokens
        kept, told, reason = row.stopper.cut(row.content, emitted, verdict.block)
        accepted, branch = min(verdict.accepted, kept), verdict.branch()
        tokens = verdict.block if kept == len(verdict.block) else verdict.block[:kept]
        row.keep(tokens, verdict.logits, verdict.scores)
        logprobs = None if verdict.logprobs is None else verdict.logprobs[:kept]
        row.logprobs += logprobs or []
        self.frequencies.add(tokens, written=True)
        beside = len(verdict.drafted) - len(branch)
        row.stats.add_round(len(branch), accepted, kept, beside)
        row.finish_reason = reason
        self._wasted += len(verdict.block) - kept
        return RowResult(row.request_id, tokens, told, branch, accepted, self._ended(row), beside, logprobs)

    def _ended(self, row: Row) -> Completion | None:
        if row.finish_reason is None:
            return None
        try:
            if self._responses is not None and row.finish_reason != "cancelled":
                self._responses.add(row.request.prompt, row.tokens)
            return row.completion()
        finally:
            if row.has_pages:
                with torch.inference_mode():
                    self._scheduler.release(row)
                    row.has_pages = False

    def _drop_cancelled(self) -> None:
        for row in self.rows:
            if row.request_id in self._cancelled:
                self._cancel(row)
        for row in self._scheduler.withdrawn(self._cancelled):
            self._cancel(row)
        self.rows = [row for row in self.rows if row.finish_reason is None]
        self._cancelled.clear()

    def _cancel(self, row: Row) -> None:
        row.finish_reason, row.has_raised = "cancelled", False
        self._results.append(RowResult(row.request_id, [], row.stopper.flush(), [], 0, self._ended(row)))


def _is_left_out(part: Part, verdict: Verdict) -> bool:
    """Whether a draft was refused for a token that its part of the vocabulary does not hold."""
    if verdict.num_right == (verdict.chain or len(verdict.drafted)):
        return False
    return verdict.block[verdict.num_right] not in part.members
