"""`CudaExecutor`: runs rounds of batches as one recording each, from drafting to acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from selfspec.control.plan import Plan
from selfspec.control.rows import StageSeconds
from selfspec.executors.cuda.round_inputs import RoundRow, RowRound
from selfspec.executors.cuda.rounds import RecordedRounds
from selfspec.executors.program import Executed, Executor, RoundDraft, next_draft
from selfspec.executors.rows import Row
from selfspec.executors.verdict import Verdict


class CudaExecutor(Executor):
    """Replays recorded rounds of the stack's runner.

    It serves neither rows with penalties, log-probabilities or logits processors, nor plans with shadow picks,
    divergences or second choices.

    Args:
        fallback: runs the rounds that cannot be recorded, because of their shape or of the model.
    """

    times_stages = False

    def __init__(self, fallback: Executor) -> None:
        super().__init__(fallback.stack, fallback.cache, fallback.picker, fallback.new_seconds)
        self._fallback = fallback

    def serves(self, rows: Sequence[Row], plan: Plan) -> bool:
        """Whether the runner may record rounds of this plan; see `Executor.serves`."""
        runner = self.stack.runner
        if runner is None or len(rows) > runner.max_rows:
            return False
        if plan.shadow is not None or plan.keep_divergence or plan.second_choices is not None:
            return False
        requests = [row.request for row in rows]
        if any(one.sampling.penalizes or one.logprobs is not None for one in requests):
            return False
        return not any(one.logits_processor or one.keep_logits for one in requests)

    def run(self, rows: Sequence[Row], plan: Plan, deadline: float) -> Iterator[Executed]:
        """Run the rounds of a plan; see `Executor.run`.

        Where no round needs what the host knows of the one before, the device runs the next round while the caller
        adds the tokens of the last one.
        """
        seconds, rounds = self.new_seconds(), None
        draft = next_draft(rows, plan)
        if plan.num_rounds > 1 and plan.table is None and all(row.stopper.ends_by_token for row in rows):
            rounds = self._begin(rows, draft)
        if rounds is None:
            yield from super().run(rows, plan, deadline)
            return
        begin, num_left, latest = seconds.now(), min(plan.num_rounds, rounds.max_rounds) - 1, 0.0
        rounds.launch()
        while rounds.num_in_flight:
            start = seconds.now()
            if num_left and not any(_surely_ends(row) for row in rows) and start - begin + latest < deadline:
                rounds.launch()
                num_left -= 1
            verdicts = [_verdict(one) for one in rounds.take()]
            latest = seconds.now() - start
            seconds.lap("verify")
            yield _executed(draft, verdicts, seconds)
            if all(row.has_ended for row in rows):
                return
            seconds = self.new_seconds()

    def round(self, rows: Sequence[Row], draft: RoundDraft) -> Executed:
        """Run one round from a recording, or by the fallback; see `Executor.round`."""
        seconds, rounds = self.new_seconds(), self._begin(rows, draft)
        if rounds is None:
            return self._fallback.round(rows, draft)
        rounds.launch()
        verdicts = draft.with_matches([_verdict(one) for one in rounds.take()])
        seconds.lap("verify")
        return _executed(draft, verdicts, seconds)

    def _begin(self, rows: Sequence[Row], draft: RoundDraft) -> RecordedRounds | None:
        """Rounds of these rows, of which none is launched; None if they cannot be recorded."""
        plan, runner = draft.plan, self.stack.runner
        assert runner is not None
        given = [()] * len(rows) if draft.given is None else [guess.tokens for guess in draft.given]
        round_rows = [_round_row(*one) for one in zip(rows, plan.draft_lengths, given, strict=True)]
        return runner.begin(self.cache, round_rows, plan, draft.longest)


def _surely_ends(row: Row) -> bool:
    """Whether the row has ended, or ends with the round in flight, which emits at least one token."""
    return row.has_ended or row.room <= 1


def _executed(draft: RoundDraft, verdicts: list[Verdict], seconds: StageSeconds) -> Executed:
    return Executed(draft.plan.exit_layer if any(one.drafted for one in verdicts) else None, verdicts, seconds)


def _round_row(row: Row, length: int, given: Sequence[int]) -> RoundRow:
    sampling, content = row.request.sampling, row.content
    return RoundRow(
        row.pages, len(content), content[-1], row.room, sorted(row.stopper.ends), length, given,
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed,
    )  # fmt: skip


def _verdict(row: RowRound) -> Verdict:
    return Verdict(row.drafted, row.path, row.block, None, None, confidences=row.confidences)
