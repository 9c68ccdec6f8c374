"""`LLMEngine`: requests join and leave while a batch is decoded; `step` is admit, read prompts, plan, run, observe."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from selfspec.control.plan import Policy
from selfspec.core import FinishReason, Plan, Request, RoundOutput, RowRound, Sequence, StageSeconds
from selfspec.decoding.checks import CheckedPolicy
from selfspec.decoding.defaults import GenerationDefaults, Prompt
from selfspec.decoding.outputs import RequestOutput, RequestOutputs
from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.decoding.scheduler import Scheduler, chunks_for
from selfspec.drafting.datastore import Datastore
from selfspec.drafting.responses import Responses
from selfspec.errors import got, is_number, whole
from selfspec.executors.cuda.device_work import current
from selfspec.executors.picker import Picker
from selfspec.executors.select import executors_for
from selfspec.learn import Learner
from selfspec.model.draft_vocabulary import Part
from selfspec.model.refusals import refuse_autocast
from selfspec.model.split_model import SplitModel
from selfspec.params import SamplingParams
from selfspec.progress import report

DEFAULT_SEQUENCE_TOKENS = 2048  # cached tokens per sequence when the caller names no budget
PAGE_SIZE = 64
STREAM_SECONDS = 1 / 30  # of a step whose tokens somebody waits for: what is streamed still seems to flow
MAX_STEP_SECONDS = 0.25  # of a step that nobody watches: an interrupt need not wait for long
OnRound = Callable[[RoundOutput], None]


class LLMEngine:
    """Decodes requests in a running batch. Made by `LLM.engine`.

    Args:
        split: the opened model's layers and heads.
        policy: plans the rounds.
        defaults: makes requests of prompts and parameters.
        max_num_seqs: sequences decoded together; more wait their turn.
        max_num_cached_tokens: tokens whose keys and values fit at once, over all sequences; requests wait until theirs
            fit. A sequence takes pages for its prompt and all it may emit when it joins, so that it can never run out
            half-way. Default: 2,048, or the model's context, for each sequence.
        page_size: tokens a page holds; default: 64, or what the attention backend asks for; on CPU without a prefix
            cache a sequence's equal share, since its keys are then one contiguous view.
        prefill_chunk: most prompt tokens read per step, so that long prompts do not hold up running sequences. On CUDA,
            they are also at most as many as take a thirtieth of a second while others decode.
        learner: improves exit heads between steps.
        corpus, responses: further texts in which drafts by lookup are found; finished outputs are added to `responses`.
        max_step_seconds: seconds after which no further round of a step begins, where its plan names no deadline;
            default: a thirtieth, and a step with a sequence's first token has one round.
        prefix_cache: keep keys and values of prompts and outputs until other requests need their memory; or the
            `PrefixCache` of an earlier engine of the same model that has ended, instead of `max_num_cached_tokens`.
        final_only: return outputs that have ended, whole, in place of what each step added.

    Raises:
        ValueError: an argument is out of range; a `DatastoreError` where the corpus holds tokens that the model does
            not know.

    Example:
        >>> engine = llm.engine()
        >>> engine.add_request("a", "def mean(values):", SamplingParams(max_tokens=32))
        >>> while engine.has_unfinished_requests():
        ...     for output in engine.step():
        ...         print(output.request_id, output.outputs[0].text)
    """

    def __init__(
        self,
        split: SplitModel,
        policy: Policy,
        defaults: GenerationDefaults,
        *,
        max_num_seqs: int = 8,
        max_num_cached_tokens: int | None = None,
        page_size: int | None = None,
        prefill_chunk: int = 512,
        learner: Learner | None = None,
        corpus: Datastore | None = None,
        responses: Responses | None = None,
        max_step_seconds: float | None = None,
        prefix_cache: bool | PrefixCache = False,
        final_only: bool = False,
    ) -> None:
        if max_step_seconds is not None and not (is_number(max_step_seconds) and max_step_seconds >= 0):
            raise ValueError(f"max_step_seconds must be a number of at least 0, got {max_step_seconds!r}")
        self.max_num_seqs = whole("max_num_seqs", max_num_seqs, 1)
        self.prefill_chunk = whole("prefill_chunk", prefill_chunk, 1)
        refuse_autocast(split.device)
        self.split, self.policy, self._defaults = split, policy, defaults
        self._policy = CheckedPolicy(policy, split.num_layers)
        if learner is not None and split.ranks is not None:
            raise ValueError("learn works by the clock of one process, got a model that is spread over several")
        if learner is not None:
            learner.follow(split)
        self._learner = learner
        if corpus is not None:
            corpus.check_fits(split.vocab_size)
        prefix = prefix_cache if isinstance(prefix_cache, PrefixCache) else None
        if prefix is None:
            cache = self._new_cache(max_num_cached_tokens, page_size, bool(prefix_cache))
            prefix = PrefixCache(cache, split) if prefix_cache else None
        else:
            cache = prefix.cache
        self.cache, self.prefix = cache, prefix
        self.frequencies = split.frequencies
        """Of the tokens that it reads and writes."""
        self.chunks = chunks_for(split, self.prefill_chunk)
        """How many of the prompts' tokens are read between two plans."""
        self.running: list[Sequence] = []
        self._responses = responses
        texts = tuple([one for one in (responses, corpus) if one is not None])
        self._scheduler = Scheduler(split, cache, defaults.tokenizer, texts, prefix, defaults.grammars)
        self._aborted: set[str] = set()
        self._outputs = RequestOutputs(defaults.tokenizer, final_only)
        # Not handed out yet; they outlive a step that raises:
        self._rows: list[RowRound] = []  # of a round that has not ended
        self._rounds: list[RoundOutput] = []
        self._num_wasted = 0  # tokens of that round beyond the end of a sequence
        self._is_streamed = max_step_seconds is None
        self._deadline = STREAM_SECONDS if max_step_seconds is None else max_step_seconds
        self._executors = executors_for(split, cache, Picker(split))
        self._executors[0].prepare(policy.likely, self.max_num_seqs)
        self._round_seconds = 0.0  # of the last round
        self._observing = 0.0  # seconds in which the policy took the last outcomes; they count with the next round
        self.num_preemptions = 0
        """How often a sequence gave its place up for a while, for want of pages."""

    def _new_cache(self, num_tokens: int | None, page_size: int | None, has_prefixes: bool) -> Any:
        if num_tokens is None:
            num_tokens = self.max_num_seqs * min(self.split.context_limit, DEFAULT_SEQUENCE_TOKENS)
        share = max(1, whole("max_num_cached_tokens", num_tokens, 1) // self.max_num_seqs)
        if page_size is None:
            is_whole = self.split.device.type == "cpu" and not has_prefixes
            page_size = share if is_whole else min(share, PAGE_SIZE)
        if num_tokens < page_size:
            raise ValueError(f"max_num_cached_tokens must hold a page of {page_size} tokens, got {num_tokens}")
        return self.split.new_cache(num_tokens // page_size, page_size)

    # ------------------------------------------------------------------------------------------------------- requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | Request,
        params: SamplingParams | None = None,
        reserve: int | None = None,
    ) -> None:
        """Queue a prompt.

        Args:
            request_id: a text that no unfinished request has.
            prompt: a text, token ids, or a mapping with "prompt" or "prompt_token_ids"; or a complete `Request`.
            params: default: `SamplingParams()`.
            reserve: new tokens that pages are taken for at a time, for requests that may write much and seldom do.
                Where none are free, it waits for others to end, or gives its place up for a while, which changes no
                token. Default: pages for `max_tokens` are taken when it joins.

        Raises:
            ValueError: an empty or too long prompt, a parameter out of range, or a `request_id` that is in use.
            CacheFullError: the request could never fit into `max_num_cached_tokens`.
        """
        name: Any = request_id
        if not isinstance(name, str) or name in self._outputs or not name:
            raise ValueError(f"request_id must be a text that no unfinished request has, got {request_id!r}")
        if isinstance(prompt, Request):
            self.add_prepared(name, None, [prompt])
            return
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be a SamplingParams or None, {got(params)}")
        text, requests = self._defaults.requests(prompt, params)
        if reserve is not None and params.prompt_logprobs is None:
            requests = [replace(request, reserve=whole("reserve", reserve, 1)) for request in requests]
        self.add_prepared(name, text, requests)

    def add_prepared(self, request_id: str, text: str | None, requests: list[Request]) -> None:
        """Queue the outputs of a request that `GenerationDefaults` has made."""
        self._aborted.discard(request_id)  # it ended before it was aborted
        self._outputs.add(request_id, text, requests)
        try:
            self._scheduler.add(request_id, requests)
        except BaseException:
            self._outputs.remove(request_id)
            raise

    def abort(self, request_id: str) -> None:
        """End a request; the next step reports it with the finish reason "abort". Unknown ids are left alone.

        May be called from any thread.
        """
        if request_id in self._outputs:
            self._aborted.add(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether a request waits or runs, or an end is still to be reported."""
        return bool(self.running or self._scheduler or self._rows or self._rounds or self._outputs.has_unreported)

    # ----------------------------------------------------------------------------------------------------------- step

    def step(self, on_round: OnRound | None = None) -> list[RequestOutput]:
        """Admit what fits, read at most `prefill_chunk` prompt tokens, and run one plan of the ready sequences.

        What a caller's processor, criterion, policy or `on_round` raises comes out here. No other request suffers: what
        it got is reported by the next step. A request whose own processor, criterion or grammar
        raised is aborted; its output's `problem` is what was raised.

        Args:
            on_round: is given every `RoundOutput` of the step.

        Returns:
            what is new of every request, in the order in which it was decoded; texts add up to the whole.
        """
        refuse_autocast(self.split.device)
        with current(self.split.device):
            return self._step(on_round)

    def _step(self, on_round: OnRound | None) -> list[RequestOutput]:
        seconds = StageSeconds()
        self._drop_finished()
        if self._rows:  # of aborted requests, and of a step that raised
            self._end_round(RoundOutput(None, [], StageSeconds()))
        if self._grow():
            self._admit()
        self._read_prompts()
        seconds.lap("prefill")
        ready = [sequence for sequence in self.running if sequence.is_prefilled and sequence.num_remaining > 0]
        if ready:
            self._policy.policy.set_waiting(self.num_waiting, self._num_joining(ready))
            plan, deadline = self._limited(self._policy.plan(ready), ready)
            rounds = self._run(ready, plan, deadline, seconds)
            clock = StageSeconds()
            self._policy.observe(plan, rounds)
            clock.lap("control")
            self._observing = clock.control
            self._round_seconds = rounds[-1].seconds.total if rounds else 0.0
        elif not self._rounds:
            self._report_reading()
            self._end_round(RoundOutput(None, [], seconds))
        self._learn()
        return self._reported(on_round)

    def _num_joining(self, ready: list[Sequence]) -> int:
        """Rows that read their prompts, or whose first token is waited for: the next program is of one round."""
        new = sum([row.num_tokens == row.num_prompt_tokens for row in ready]) if self._is_streamed else 0
        return len(self.running) - len(ready) + new

    def _run(self, rows: list[Sequence], plan: Plan, deadline: float, seconds: StageSeconds) -> list[RoundOutput]:
        """Run a plan, and give the sequences their tokens round by round; those rounds that ended before an error."""
        vocabulary = self._draft_vocabulary(plan, rows)
        seconds.lap("control")
        seconds.control, self._observing = seconds.control + self._observing, 0.0
        executor = next(one for one in self._executors if one.serves(rows, plan))
        rounds = list[RoundOutput]()
        try:
            for round_ in executor.run(rows, plan, deadline):
                if all(row.is_finished for row in rows):  # by stop strings, which compiled rounds know nothing of
                    self._waste(round_)
                    continue
                round_.plan, round_.round_index = plan, len(rounds)
                self._take(round_, vocabulary)
                round_.seconds.prefill += seconds.prefill
                round_.seconds.control += seconds.control
                seconds = StageSeconds()
                self._end_round(round_)
                rounds.append(round_)
        except BaseException:
            self._drop_finished()
            if rounds:
                self._policy.observe(plan, rounds)
            raise
        self._drop_finished()
        return rounds

    def _limited(self, plan: Plan, rows: list[Sequence]) -> tuple[Plan, float]:
        """The plan with as many rounds as may be run at once, and the seconds after which no further one begins."""
        deadline = self._deadline if plan.deadline is None else plan.deadline
        if any(not row.stopper.ends_by_token for row in rows):
            deadline = min(deadline, STREAM_SECONDS)  # where they end, what was decoded beyond is in vain
        most = plan.num_rounds if len(rows) == len(self.running) else 1  # others wait for their prompts to be read
        if self._is_streamed and any(row.num_tokens == row.num_prompt_tokens for row in rows):
            most = 1  # a first token is waited for, and tokens are handed out after a step
        if self.split.ranks is not None:  # clocks differ between ranks
            in_time = deadline / self._round_seconds if self._round_seconds else 1
            most, deadline = self.split.agreed(max(1, int(min(most, in_time)))), math.inf
        return (plan if most == plan.num_rounds else replace(plan, num_rounds=most)), deadline

    def _draft_vocabulary(self, plan: Plan, rows: list[Sequence]) -> Part | None:
        """The part of the vocabulary that layers draft over; None: all of it, or no layer drafts."""
        if plan.draft_vocab is None or not plan.exit_layer or not self.split.has_draft_heads:
            return None
        if plan.draft_vocab >= self.split.vocab_size or any(row.needs_vocabulary for row in rows):
            return None
        return self.frequencies.part(plan.draft_vocab)

    def _take(self, round_: RoundOutput, vocabulary: Part | None) -> None:
        """Give sequences the tokens of a round; those that a stop string ended before get none of it."""
        start = round_.seconds.now()
        for row in round_.rows:
            if row.sequence.is_finished:
                self._num_wasted += len(row.token_ids)
                continue
            num_drafted = row.num_drafted + (row.withdrawn is not None)
            if vocabulary is not None and round_.exit_layer and row.num_accepted < num_drafted:
                row.is_outside_vocab = row.token_ids[row.num_accepted] not in vocabulary.members
            try:
                self._emit(row)
                self._rows += [row]  # no call, after which an interrupt would be taken for one before
            except BaseException as problem:  # of its criterion or grammar; or an interrupt
                row.sequence.problem = problem
                raise
        round_.seconds.rest += round_.seconds.now() - start

    def _emit(self, row: RowRound) -> None:
        """Add a round's tokens to their sequence, as far as it does not end before."""
        sequence, num_tokens = row.sequence, len(row.token_ids)
        emitted = sequence.num_tokens - sequence.num_prompt_tokens
        kept, row.text, row.finish_reason = sequence.stopper.cut(sequence.token_ids, emitted, row.token_ids)
        row.cut(kept)
        sequence.append(row)
        self.frequencies.add(row.token_ids, written=True)
        sequence.stats.add_round(len(row.drafted), row.num_accepted, kept)
        self._num_wasted += num_tokens - kept
        if row.finish_reason is not None:
            self._finish(sequence, row.finish_reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        try:
            if self._responses is not None:
                self._responses.add(sequence.request.prompt_token_ids, sequence.completion_token_ids)
        finally:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.has_pages:
            with torch.inference_mode():
                self._scheduler.release(sequence)
                sequence.has_pages = False

    def _waste(self, round_: RoundOutput) -> None:
        """Count a round that no sequence was left for with the one before."""
        last = self._rounds[-1]
        last.seconds.rest += round_.seconds.total
        last.num_wasted += sum([len(row.token_ids) for row in round_.rows])

    def _end_round(self, round_: RoundOutput) -> None:
        round_.rows, round_.num_wasted = self._rows, self._num_wasted
        self._rounds += [round_]
        self._rows, self._num_wasted = [], 0  # no call in between, after which an interrupt would have rows twice

    def _learn(self) -> None:
        if self._learner is None:
            return
        clock = StageSeconds()
        ended = [row.sequence for round_ in self._rounds for row in round_.rows if row.finish_reason is not None]
        self._learner.after(ended, sum(round_.seconds.total for round_ in self._rounds))
        clock.lap("control")
        self._rounds[-1].seconds.control += clock.control

    def _reported(self, on_round: OnRound | None) -> list[RequestOutput]:
        rounds, self._rounds = self._rounds, []
        self._outputs.collect(rounds)
        if on_round is not None:
            for round_ in rounds:
                on_round(round_)
        return self._outputs.take()

    # ---------------------------------------------------------------------------------------------- joining, leaving

    @torch.inference_mode()
    def _admit(self) -> None:
        for sequence in self._scheduler.admitted(self.max_num_seqs - len(self.running)):
            self.running.append(sequence)
            self.frequencies.add(sequence.request.prompt_token_ids[sequence.num_cached :])
            self.split.refresh()  # a sequence is decoded by the weights as they are when it joins

    @torch.inference_mode()
    def _grow(self) -> bool:
        """Take further pages for sequences that need some; whether all of them have what they need.

        Where none can go on, those that joined last give their pages up.
        """
        while True:
            parked = [one for one in self.running if one.is_prefilled and not self._scheduler.extended(one)]
            if not parked or len(parked) < len(self.running):
                return not parked
            self.num_preemptions += 1
            self._scheduler.requeue(self.running[-1])
            self.running = self.running[:-1]

    @torch.inference_mode()
    def _read_prompts(self) -> None:
        if any(not sequence.is_prefilled for sequence in self.running):
            self.chunks.measured(self._read_chunk)
        self._scheduler.publish(self.running)

    def _read_chunk(self) -> int:
        """Read a chunk of the prompts; the number of its tokens."""
        readers = self._scheduler.readers(self.running)
        before = sum([sequence.num_cached for sequence in readers])
        are_waiting = any(sequence.is_prefilled for sequence in self.running)  # for their next round
        most = self.split.agreed(self.chunks.size()) if are_waiting else self.prefill_chunk
        self._executors[-1].prefill(readers, most, self.policy)
        return sum([sequence.num_cached for sequence in readers]) - before

    def _report_reading(self) -> None:
        num_read = sum([sequence.num_cached for sequence in self.running])
        report("%d of %d tokens", num_read, sum([sequence.num_tokens - 1 for sequence in self.running]))

    def _drop_finished(self) -> None:
        """Sequences that ended, that were aborted, or whose own code raised, leave between two plans.

        After an interrupt in it, the next call does the rest.
        """
        aborted = {*self._aborted}  # other threads add to it
        waiting = [one for one in self._scheduler.waiting if one.request_id in aborted] if aborted else []
        for sequence in (*self.running, *waiting):
            if sequence.problem is not None or (sequence.request_id in aborted and not sequence.is_finished):
                self._abort(sequence)
        self.running = [sequence for sequence in self.running if not sequence.is_finished]
        for sequence in waiting:
            self._scheduler.waiting.remove(sequence)
        self._aborted -= aborted

    def _abort(self, sequence: Sequence) -> None:
        self._release(sequence)
        text, problem = sequence.stopper.flush(), sequence.problem
        row = RowRound(sequence, 0, 0, [], text=text, finish_reason="abort", problem=problem)
        # no call from here on, after which an interrupt would have it reported twice
        sequence.finish_reason, sequence.problem = "abort", None
        self._rows += [row]

    def close(self) -> None:
        """Give back the pages of all sequences. Nothing may be done with the engine after that."""
        for sequence in self.running:
            self._release(sequence)
        self.running = []

    # --------------------------------------------------------------------------------------------------------- counts

    @property
    def num_waiting(self) -> int:
        """Outputs that wait for a place in the batch."""
        return len(self._scheduler)

    @property
    def num_running(self) -> int:
        """Outputs that have a place: their prompts are read, or they are decoded."""
        return len(self.running)

    @property
    def max_num_cached_tokens(self) -> int:
        """Tokens whose keys and values fit at once."""
        return self.cache.capacity

    @property
    def num_pages_in_use(self) -> int:
        """Pages of `cache` that running sequences hold; the others are free, or are freed when they are needed."""
        num_idle = 0 if self.prefix is None else self.prefix.num_idle_pages
        return int(self.cache.num_pages - self.cache.num_free_pages - num_idle)

    @property
    def kv_cache_usage(self) -> float:
        """The share of the cache's pages that running sequences hold, in 0..1."""
        return self.num_pages_in_use / int(self.cache.num_pages)

    @property
    def prefix_cache_queries(self) -> int:
        """Prompt tokens of requests that began to run, since the engine was made; 0 without a prefix cache."""
        return 0 if self.prefix is None else self.prefix.num_queried

    @property
    def prefix_cache_hits(self) -> int:
        """Those of them whose keys and values were there already."""
        return 0 if self.prefix is None else self.prefix.num_found
