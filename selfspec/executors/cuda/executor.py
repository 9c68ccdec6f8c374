"""`CudaExecutor`: runs rounds of batches as one recording each, from drafting to acceptance."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

from selfspec.control.plan import table_of
from selfspec.core import Plan, RoundOutput, RowRound, Sequence, StageSeconds
from selfspec.executors.base import Executor, RoundDraft, next_draft
from selfspec.executors.cuda.round_inputs import RoundRow, RowResult
from selfspec.executors.cuda.rounds import RecordedRounds


class CudaExecutor(Executor):
    """Replays recorded rounds of the split model's runner.

    It serves neither rows with penalties, log-probabilities or logits processors, nor plans with shadow picks,
    divergences or second choices.

    Args:
        fallback: runs the rounds that cannot be recorded, because of their shape or of the model.
    """

    times_stages = False

    def __init__(self, fallback: Executor) -> None:
        super().__init__(fallback.split, fallback.cache, fallback.picker, fallback.new_seconds)
        self._fallback = fallback

    def serves(self, rows: list[Sequence], plan: Plan) -> bool:
        """Whether the runner may record rounds of this plan; see `Executor.serves`."""
        runner = self.split.runner
        if runner is None or len(rows) > runner.max_rows:
            return False
        if plan.shadow is not None or plan.keep_divergence or plan.alternatives is not None:
            return False
        if any(row.has_processors or row.grammar is not None or row.request.keep_logits for row in rows):
            return False
        return not any(row.request.params.penalizes or row.request.params.logprobs is not None for row in rows)

    def run(self, rows: list[Sequence], plan: Plan, deadline: float) -> Iterator[RoundOutput]:
        """Run the rounds of a plan; see `Executor.run`.

        Where no round needs what the host knows of the one before, the device runs the next round while the caller
        adds the tokens of the last one.
        """
        seconds, rounds = self.new_seconds(), None
        draft = next_draft(rows, plan)
        if plan.num_rounds > 1 and table_of(plan) is None and all(row.stopper.ends_by_token for row in rows):
            rounds = self._begin(rows, draft)
        if rounds is None:
            yield from super().run(rows, plan, deadline)
            return
        begin, num_left, latest = seconds.now(), min(plan.num_rounds, rounds.max_rounds) - 1, 0.0
        ledger = plan.ledger
        rounds.launch()
        while rounds.num_in_flight:
            start = seconds.now()
            if num_left and not any(_surely_ends(row) for row in rows) and start - begin + latest < deadline:
                rounds.launch()
                num_left -= 1
            outputs = [_row_round(*pair) for pair in zip(rows, rounds.take(), strict=True)]
            latest = seconds.now() - start
            seconds.lap("verify")
            yield (made := _output(draft, outputs, seconds))
            if all(row.is_finished for row in rows):
                return
            ledger = ledger.after(made) if ledger is not None and self.split.ranks is None else None
            if ledger is not None and made.exit_layer is not None and not ledger.covers_layers:
                num_left = 0
            seconds = self.new_seconds()

    def round(self, rows: list[Sequence], draft: RoundDraft) -> RoundOutput:
        """Run one round from a recording, or by the fallback; see `Executor.round`."""
        seconds, rounds = self.new_seconds(), self._begin(rows, draft)
        if rounds is None:
            return self._fallback.round(rows, draft)
        rounds.launch()
        outputs = [_row_round(*pair) for pair in zip(rows, rounds.take(), strict=True)]
        draft.add_matches(outputs)
        seconds.lap("verify")
        return _output(draft, outputs, seconds)

    def _begin(self, rows: list[Sequence], draft: RoundDraft) -> RecordedRounds | None:
        """Rounds of these rows, of which none is launched; None if they cannot be recorded."""
        plan, runner = draft.plan, self.split.runner
        assert runner is not None
        given = [[]] * len(rows) if draft.given is None else [one.token_ids for one in draft.given]
        round_rows = [_round_row(*one) for one in zip(rows, plan.draft_lengths, given, strict=True)]
        return runner.begin(self.cache, round_rows, plan, draft.longest)


def _surely_ends(row: Sequence) -> bool:
    """Whether the row has ended, or ends with the round in flight, which emits at least one token."""
    return row.is_finished or row.num_remaining <= 1


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
