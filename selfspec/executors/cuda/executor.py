"""`CudaExecutor`: runs rounds of batches as one recording each, from drafting to acceptance."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from selfspec.core import Plan, RoundOutput, RowRound, Sequence, StageSeconds
from selfspec.drafting.early_exit import PackedDraft
from selfspec.executors.after_round import add_divergences, add_shadow_picks
from selfspec.executors.base import Executor, RoundDraft, next_draft
from selfspec.executors.cuda.rounds import SLOTS, RecordedRounds, RoundRow, RowResult
from selfspec.executors.eager import EagerExecutor
from selfspec.executors.final_states import before_each, keep_finals, states_of
from selfspec.executors.masks import mask_of
from selfspec.executors.penalties import Penalties
from selfspec.kernels.layout import MOST_EOS


def in_order(likely: Callable[[int], list[Plan]], max_rows: int) -> list[tuple[int, Plan]]:
    """The rounds that are recorded before decoding, in order: numbers of rows, and plans for them.

    Args:
        likely: see `Policy.likely`.
        max_rows: the most rows that decode together.
    """
    counts = [max_rows, *[slots for slots in SLOTS if slots < max_rows]]
    listed = [(rows, likely(rows)) for rows in counts if rows <= SLOTS[-1]]
    first = [(rows, plan) for rows, plans in listed for plan in plans[:1]]
    return first + [(rows, plan) for rows, plans in listed for plan in plans[1:]]


class CudaExecutor(Executor):
    """Replays recorded rounds of the split model's runner.

    A recorded round drafts as many tokens as planned: stop rules and alternatives are left out. Where layers draft,
    rows with grammars or processors draft nothing: recordings draft without these, and nearly all would be rejected.
    Probes, divergences, and what rows with penalties, log-probabilities, grammars or processors get are computed on the
    host from the hidden states that a recorded round returns.

    Args:
        fallback: runs what cannot be recorded, because of its shape or of the model, and picks on the host.
    """

    times_stages = False

    def __init__(self, fallback: EagerExecutor) -> None:
        super().__init__(fallback.split, fallback.cache, fallback.picker, fallback.new_seconds)
        self._fallback = fallback

    def serves(self, rows: list[Sequence], plan: Plan) -> bool:
        """Whether rounds may be recorded; see `Executor.serves`."""
        return self.split.runner is not None

    def prepare(self, likely: Callable[[int], list[Plan]], max_rows: int) -> None:
        """Record the rounds of these plans; see `Executor.prepare` and `Runner.prepare`."""
        runner = self.split.runner
        if runner is None:
            return
        runner.prepare(self.cache, in_order(likely, max_rows))

    def run(self, rows: list[Sequence], plan: Plan, deadline: float) -> Iterator[RoundOutput]:
        """Run the rounds of a plan; see `Executor.run`.

        Where rows end by tokens or their length alone, the device runs a round while the caller adds the tokens of the
        one before. A draft by lookup or by grammar waits until the round in flight has ended.
        """
        if plan.num_rounds == 1 or _reads_states(plan) or not all(map(_goes_on_alone, rows)):
            yield from super().run(rows, plan, deadline)
            return
        seconds, num_left, latest = self.new_seconds(), plan.num_rounds, 0.0
        begin, kind = seconds.now(), RoundDraft(plan)  # of the rounds under way
        flight: RecordedRounds | None = None
        while True:
            start, num_begun = seconds.now(), flight.num_in_flight if flight else 0
            is_late = num_left < plan.num_rounds and start - begin + latest >= deadline
            goes_on = num_left > 0 and not is_late and not any(_ends(row, num_begun) for row in rows)
            draft = next_draft(rows, plan) if goes_on else None
            if flight is None:
                if draft is None:
                    return
                flight, kind = self._begin(rows, draft) if draft.given is None else None, draft
                if flight is None:
                    num_left -= 1
                    made = self.round(rows, draft)
                else:
                    seconds.lap("control")  # recording them may have taken long
                    num_left -= flight.go_on()
                    is_late = seconds.now() - begin + latest >= deadline
                    if num_left and not is_late and not any(_ends(row, 1) for row in rows):
                        num_left -= flight.go_on()
            elif draft is not None and draft.given is None and draft.plan.exit_layer == kind.plan.exit_layer:
                num_left -= flight.go_on()
            if flight is not None:
                outputs = [_row_round(*pair) for pair in zip(rows, flight.take(), strict=True)]
                seconds.lap("verify")
                made = _output(kind, outputs, seconds)
                if not flight.num_in_flight:
                    _keep_finals(outputs, flight.finals)
                    flight = None
            latest = seconds.now() - start
            yield made
            if all(row.is_finished for row in rows):
                return
            if plan.ledger is not None and self.split.ranks is None:  # else ranks, whose clocks differ, would part
                ledger = plan.ledger.after(made)
                plan = replace(plan, ledger=ledger)
                num_left = 0 if made.exit_layer and not ledger.covers_layers else num_left
            seconds = self.new_seconds()

    @torch.inference_mode()
    def round(self, rows: list[Sequence], draft: RoundDraft) -> RoundOutput:
        """Run one round; see `Executor.round`."""
        seconds, free = self.new_seconds(), _without_rows_that_need_vocabulary(rows, draft)
        rounds = self._begin(rows, free)
        if rounds is None:
            return self._fallback.round(rows, draft)
        plan = free.plan
        layers = plan.shadow.layers if plan.shadow else (plan.exit_layer or 0,) if plan.keep_divergence else ()
        on_host = [at for at, row in enumerate(rows) if _reads_states(plan) or _is_picked_on_host(row)]
        seconds.lap("control")
        states = rounds.launch(on_host, layers)  # the device runs it, while the host does this:
        for at in on_host:
            mask_of(rows[at], ())
        done = rounds.take()
        outputs = [*map(_row_round, rows, done)]
        _keep_finals(outputs, rounds.finals)
        seconds.lap("verify")
        if states is not None:
            some, results = [rows[at] for at in on_host], [done[at] for at in on_host]
            picked = self._picked(some, results, states, plan, seconds)
            for at, output in zip(on_host, picked, strict=True):
                outputs[at] = output
        free.add_matches(outputs)
        return _output(free, outputs, seconds)

    def _picked(
        self, rows: list[Sequence], done: list[RowResult], states: Tensor, plan: Plan, seconds: StageSeconds
    ) -> list[RowRound]:
        """What rows get whose picks the device does not know, and what the plan wants to know of them.

        Args:
            done: what the device made of them.
            states: `[1 + layers, rows, places, hidden_size]`, the last hidden states, and those after the layers that
                the plan asks for.
        """
        drafts = [one.drafted for one in done]
        packed = torch.cat([states[:, at, : len(one) + 1] for at, one in enumerate(drafts)], 1)
        logits = self.split.logits(packed[0])
        fed = PackedDraft.given([row.token_ids[-1] for row in rows], drafts, self.split.device)
        positions = [row.num_tokens + n for row, one in zip(rows, drafts, strict=True) for n in range(len(one) + 1)]
        penalties = Penalties.of(rows, self.split.vocab_size, self.split.device)
        outputs, scores = self._fallback.accept(rows, fed, logits, positions, penalties)
        for output, one in zip(outputs, done, strict=True):
            output.confidences = one.confidences
        if plan.keep_divergence and plan.exit_layer:
            by_row = self.split.logits(packed[-1], plan.exit_layer).split([len(one) + 1 for one in drafts])
            add_divergences(outputs, by_row, scores)
        if plan.shadow is not None:
            last = before_each(states_of(self.split, rows), packed[0], [len(one) + 1 for one in drafts])
            add_shadow_picks(self.split, self.picker, plan.shadow, outputs, [packed[1:]], logits, penalties, last)
        if self.split.exit_heads is not None:
            keep_finals(outputs, packed[0], [len(one) + 1 for one in drafts])
        seconds.lap("pick" if plan.shadow is None else "shadow")
        return outputs

    def _begin(self, rows: list[Sequence], draft: RoundDraft) -> RecordedRounds | None:
        """Rounds of these rows, of which none is launched; None if they cannot be recorded."""
        plan, runner = draft.plan, self.split.runner
        assert runner is not None
        given = [[]] * len(rows) if draft.given is None else [one.token_ids for one in draft.given]
        round_rows = [_round_row(*one) for one in zip(rows, plan.draft_lengths, given, strict=True)]
        return runner.begin(self.cache, round_rows, plan, draft.longest, states_of(self.split, rows))


def _reads_states(plan: Plan) -> bool:
    """Whether the host computes something of all rows' hidden states after each round."""
    return plan.shadow is not None or plan.keep_divergence


def _is_picked_on_host(row: Sequence) -> bool:
    """Whether more than logits, temperature and filters decides what the row gets, or more than tokens is asked for."""
    params, asks = row.request.params, row.request.keep_logits or row.request.params.logprobs is not None
    return params.penalizes or asks or row.grammar is not None or row.has_processors


def _goes_on_alone(row: Sequence) -> bool:
    """Whether the device knows all that the row's next round depends on."""
    is_known = row.stopper.ends_by_token and len(row.stopper.ends) <= MOST_EOS
    return is_known and not _is_picked_on_host(row)


def _ends(row: Sequence, num_in_flight: int) -> bool:
    """Whether the row has ended, or surely ends with the rounds in flight, each of which emits at least one token."""
    return row.is_finished or row.num_remaining <= num_in_flight


def _without_rows_that_need_vocabulary(rows: list[Sequence], draft: RoundDraft) -> RoundDraft:
    """The draft, in which layers draft nothing for these rows."""
    plan = draft.plan
    if draft.given is not None or not plan.exit_layer or not any(row.needs_vocabulary for row in rows):
        return draft
    lengths = [0 if row.needs_vocabulary else n for row, n in zip(rows, plan.draft_lengths, strict=True)]
    if any(lengths):
        return draft._replace(plan=replace(plan, draft_lengths=tuple(lengths)))
    return RoundDraft(Plan(None, tuple(lengths), shadow=plan.shadow))


def _keep_finals(outputs: list[RowRound], finals: Tensor | None) -> None:
    """Keep the rows' final states `[rows, hidden_size]` after a round, before its tokens are appended."""
    for at, output in enumerate(outputs if finals is not None else ()):
        row, count = output.sequence, len(output.token_ids)
        if finals is not None and count:
            row.final_state, row.final_at = finals[at], row.num_tokens + count - 2


def _output(draft: RoundDraft, outputs: list[RowRound], seconds: StageSeconds) -> RoundOutput:
    return RoundOutput(draft.plan.exit_layer if any(one.drafted for one in outputs) else None, outputs, seconds)


def _round_row(row: Sequence, length: int, given: abc.Sequence[int]) -> RoundRow:
    temperature, top_k, top_p, min_p = row.request.params.filters
    return RoundRow(
        row.pages, row.num_tokens, row.token_ids[-1], row.num_remaining, sorted(row.stopper.ends), length, given,
        temperature, top_k, top_p, min_p, row.request.params.seed,
    )  # fmt: skip


def _row_round(sequence: Sequence, row: RowResult) -> RowRound:
    accepted = max(0, len(row.block) - 1)  # no token: it had ended in an earlier round
    return RowRound(sequence, len(row.drafted), accepted, row.block, row.drafted, row.confidences)
