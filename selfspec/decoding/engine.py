"""`Engine`: rows join and leave between rounds; `step` is prefill, plan, round, accept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from selfspec.control.laps import Seconds
from selfspec.control.plan import LOOKUP, Plan, Policy, Steady
from selfspec.control.rows import Looked, RowOutcome
from selfspec.decoding.afterwards import Teach
from selfspec.decoding.ahead import Ahead
from selfspec.decoding.checked import CheckedPolicy
from selfspec.decoding.intake import Intake
from selfspec.decoding.offers import Decodable, policy_for
from selfspec.decoding.picker import Picker
from selfspec.decoding.prefill import prefill
from selfspec.decoding.request import Completion, Request
from selfspec.decoding.results import Round, RowResult
from selfspec.decoding.rounds import decode_round
from selfspec.decoding.row import Row
from selfspec.decoding.verdict import Verdict
from selfspec.drafting.datastore import Datastore
from selfspec.errors import flag, is_number, whole
from selfspec.target.draft_head import Part
from selfspec.target.refusals import refuse_autocast
from selfspec.target.stack import Stack

DEFAULT_ROW_TOKENS = 2048  # cached tokens per row when the caller names no budget
CUDA_PAGE_SIZE = 64


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
    """Decodes requests in a running batch whose rows join and leave between rounds.

    Args:
        target: what `selfspec.load` returns.
        policy: a name, or a `selfspec.Policy`; default: `adaptive`, or `fixed` where an exit layer or a
            draft length is named.
        drafts: where those of `adaptive` may come from, some of `control.plan.DRAFTS`; default: all.
        max_batch_size: rows decoded together; more wait their turn.
        max_cached_tokens: tokens whose keys and values fit at once, over all rows; rows wait until theirs fit. A row
            takes pages for its prompt and all it may emit when it joins, so that it can never run out half-way.
        page_size: tokens a page holds; default: a row's equal share on CPU (its keys are then one contiguous view), 64
            on CUDA, or what the attention backend asks for.
        prefill_chunk: most prompt tokens read per step, so that long prompts do not hold up running rows.
        learn: a `selfspec.learn.Learner` of this target, which improves its exit heads between rounds.
        datastore: an open `selfspec.drafting.datastore.Datastore` of the target's tokenizer: where `adaptive` drafts by
            lookup, texts of the corpus continue a row, too.
        exact: run every call in constant shapes, so that speculation equals plain decoding bit for bit in any number
            format, and no row depends on its neighbours; see `selfspec.target.exact`.
        burst: seconds of rounds that may be decoded in one compiled call, before the first of them is handed out;
            default: a thirtieth.

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
        exact: bool = False,
        burst: float | None = None,
    ) -> None:
        if burst is not None and not (is_number(burst) and burst >= 0):
            raise ValueError(f"burst must be a number of seconds, at least 0, got {burst!r}")
        whole("max_batch_size", max_batch_size, 1)
        whole("prefill_chunk", prefill_chunk, 1)
        flag("exact", exact)
        self.target, self.exact = target, exact
        self.stack = target.exact_stack if exact else target.stack
        refuse_autocast(self.stack.device)
        self.frequencies = self.stack.frequencies
        """Of the tokens that it reads and writes."""
        if max_cached_tokens is None:
            max_cached_tokens = max_batch_size * min(self.stack.context_limit, DEFAULT_ROW_TOKENS)
        if page_size is None:
            share = max(1, max_cached_tokens // max_batch_size)
            page_size = share if self.stack.device.type == "cpu" else min(share, page_size_of(self.stack))
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
        self.cache = self.stack.new_cache(max_cached_tokens // page_size, page_size)
        self.rows: list[Row] = []
        self._picker = Picker(self.stack)
        self._intake = Intake(target, self.stack, self.cache, datastore)
        self._cancelled: set[int] = set()
        self._results: list[RowResult] = []  # not handed out yet; they outlive a step that raises
        self._ahead = Ahead(burst)

    @property
    def policy(self) -> Policy:
        """Who plans."""
        return self._checked.policy

    @property
    def num_waiting(self) -> int:
        return len(self._intake)

    @property
    def has_work(self) -> bool:
        return bool(self.rows or self._intake or self._results)

    def submit(self, prompt: str | Sequence[int] | Request, **options: Any) -> int:
        """Queue a prompt; returns its request id. Options are those of `Target.generate`.

        Raises:
            ValueError: the prompt is empty or longer than the context, or an option is out of range.
            CacheFullError: the request could never fit into `max_cached_tokens`.
        """
        return self._intake.submit(prompt, options)

    def cancel(self, request_id: int) -> None:
        """End a request; its pages are free from the next step on. Finished or unknown requests are left alone."""
        if any(row.request_id == request_id for row in self.rows) or request_id in self._intake:
            self._cancelled.add(request_id)

    def step(self) -> Round:
        """Admit what fits, read at most `prefill_chunk` prompt tokens, and decode one round of the ready rows.

        Where rounds were decoded in one call with an earlier one (see `decoding.ahead`), the next of them is handed out
        instead, and nobody is admitted before they all are.

        What a caller's processor, criterion or policy raises comes out here. No other row suffers: what it got is
        reported by the next step. A row whose own processor or criterion raised is cancelled.
        """
        refuse_autocast(self.stack.device)
        seconds = Seconds()
        if self._cancelled:
            self._drop_cancelled()
        if not self._ahead:  # else rounds are there already, and nobody waits for them long
            with torch.inference_mode():
                self._admit()
                self._prefill()
            seconds.lap("prefill")
        plan, is_ahead = self._decode(seconds)
        seconds.add("control", self._ahead.lost())  # what was decoded for a plan that did not come
        if self.learn is not None:
            self.learn.after(sum(row.completion is not None for row in self._results), seconds.total)
            seconds.lap("control")
        results, self._results = self._results, []
        return Round(results, plan, seconds, is_ahead)

    def _decode(self, seconds: Seconds) -> tuple[Plan | None, bool]:
        """One round; its plan, and whether it was there already."""
        ready = [row for row in self.rows if row.num_cached == len(row.content) - 1]
        if not ready:
            return None, False
        policy = self.policy
        plan, hears_lookup = self._checked.plan(ready), policy.hears_lookup
        seconds.lap("control")
        outcomes: list[RowOutcome] = []
        try:
            part = self._part(plan, ready)
            verdicts, is_ahead = self._verdicts(ready, plan, part, seconds)
            left_out = [part is not None and _is_left_out(part, verdict) for verdict in verdicts]
            looks: list[Looked | None] = [None] * len(ready)
            if hears_lookup:
                looks = [row.looked(v.block) for row, v in zip(ready, verdicts, strict=True)]
            for row, verdict, looked, is_out in zip(ready, verdicts, looks, left_out, strict=True):
                result = self._apply(row, verdict)
                self._results.append(result)
                outcome = verdict.outcome(row.request_id, result.num_accepted, looked)
                is_out = is_out and outcome.num_accepted < outcome.num_drafted  # else its row ended before it
                outcomes.append(outcome._replace(is_left_out=True) if is_out else outcome)
        finally:
            self._drop_ended(ready)
        seconds.lap("rest")
        policy.observe(plan, outcomes, seconds)
        seconds.lap("control")
        seconds.decided = seconds.control
        return plan, is_ahead

    def _verdicts(
        self, rows: Sequence[Row], plan: Plan, part: Part | None, seconds: Seconds
    ) -> tuple[list[Verdict], bool]:
        """What a round comes to, and whether it was there already."""
        waiting = self._ahead.take(rows, plan, part, seconds)
        if waiting is not None:
            return waiting, True
        self._look_ahead(plan, rows)
        teach = None if self.learn is None else self.learn.take
        how = teach, self._picker, True, self._ahead
        with torch.inference_mode():
            return decode_round(self.stack, self.cache, rows, plan, seconds, *how), False

    def _drop_ended(self, rows: Sequence[Row]) -> None:
        """Rows that ended in a round, or whose own code raised in it, leave."""
        for row in rows:
            if row.has_raised:
                self._cancel(row)
        if any(row.finish_reason is not None for row in rows):
            self.rows = [row for row in self.rows if row.finish_reason is None]
            self._ahead.forget()

    def run(self) -> Iterator[Round]:
        """Rounds until nothing is left to do."""
        while self.has_work:
            yield self.step()

    def _admit(self) -> None:
        for row in self._intake.admitted(self.max_batch_size - len(self.rows)):
            self.frequencies.add(row.request.prompt)
            self.stack.refresh()  # a row is decoded by the weights as they are when it joins
            self.rows.append(row)

    def _prefill(self) -> None:
        prefill(self.stack, self.cache, self._picker, self.rows, self.prefill_chunk, self.policy)

    def _look_ahead(self, plan: Plan, rows: Sequence[Row]) -> None:
        """How far rounds may be decoded together with one of this plan."""
        steady = self._checked.steady(plan) if len(rows) == len(self.rows) else Steady()
        usual = steady.usual if plan.exit_layer == LOOKUP else plan
        if usual is None:
            steady, usual = Steady(), plan
        self._ahead.allow(steady, usual, self._part(usual, rows), self._checked.reads_lookup)

    def _part(self, plan: Plan, rows: Sequence[Row]) -> Part | None:
        """The part of the vocabulary that layers draft over; None: all of it, or no layer drafts."""
        if plan.draft_vocab is None or not plan.exit_layer or not self.stack.has_draft_heads:
            return None
        if plan.draft_vocab >= self.stack.vocab_size or any(row.request.logits_processor for row in rows):
            return None
        return self.frequencies.part(plan.draft_vocab)

    def _apply(self, row: Row, verdict: Verdict) -> RowResult:
        emitted = len(row.content) - row.num_prompt_tokens
        try:
            kept, told, reason = row.stopper.cut(row.content, emitted, verdict.block)
        except BaseException:
            row.has_raised = True  # criteria are the caller's own code
            raise
        accepted, branch = min(verdict.accepted, kept), verdict.branch()
        tokens = verdict.block if kept == len(verdict.block) else verdict.block[:kept]
        row.keep(tokens, verdict.logits, verdict.scores)
        self.frequencies.add(tokens, written=True)
        beside = len(verdict.drafted) - len(branch)
        row.stats.add_round(len(branch), accepted, kept, beside)
        row.finish_reason = reason
        return RowResult(row.request_id, tokens, told, branch, accepted, self._ended(row), beside)

    def _ended(self, row: Row) -> Completion | None:
        if row.finish_reason is None:
            return None
        try:
            return row.completion()
        finally:
            with torch.inference_mode():
                self.cache.release(row.pages, row.limit)

    def _drop_cancelled(self) -> None:
        for row in self.rows:
            if row.request_id in self._cancelled:
                self._cancel(row)
        for row in self._intake.withdrawn(self._cancelled):
            self._cancel(row)
        self.rows = [row for row in self.rows if row.finish_reason is None]
        self._cancelled.clear()
        self._ahead.forget()

    def _cancel(self, row: Row) -> None:
        row.finish_reason = "cancelled"
        self._results.append(RowResult(row.request_id, [], row.stopper.flush(), [], 0, self._ended(row)))


def _is_left_out(part: Part, verdict: Verdict) -> bool:
    """Whether a draft was refused for a token that its part of the vocabulary does not hold."""
    if verdict.num_right == (verdict.chain or len(verdict.drafted)):
        return False
    return verdict.block[verdict.num_right] not in part.members
