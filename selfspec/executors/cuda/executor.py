"""`CudaExecutor`: rounds of small batches, each of them one recording from its drafts to acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.control.plan import Plan
from selfspec.executors.cuda.whole_round import RoundRow, RowRound
from selfspec.executors.program import Executed, Executor, RoundDraft
from selfspec.executors.rows import Row
from selfspec.executors.verdict import Verdict


class CudaExecutor(Executor):
    """Replays recorded rounds of the stack's runner.

    Rows with penalties, and those that ask for log-probabilities, are left to the eager executor.
    Second choices are left out, since the host would have to wait for every drafted token to know where they belong.

    Args:
        otherwise: runs the rounds that have no recording: of other shapes, or of a model that cannot be recorded.
    """

    def __init__(self, otherwise: Executor) -> None:
        super().__init__(otherwise.stack, otherwise.cache, otherwise.picker, otherwise.new_seconds)
        self._otherwise = otherwise

    def serves(self, rows: Sequence[Row], plan: Plan) -> bool:
        runner = self.stack.runner
        if runner is None or len(rows) > runner.max_rows or plan.shadow is not None or plan.keep_divergence:
            return False
        requests = [row.request for row in rows]
        if any(one.sampling.penalizes or one.logprobs is not None for one in requests):
            return False
        return not any(one.logits_processor or one.keep_logits for one in requests)

    @torch.inference_mode()
    def round(self, rows: Sequence[Row], draft: RoundDraft) -> Executed:
        plan, seconds, runner = draft.plan, self.new_seconds(), self.stack.runner
        given = [()] * len(rows) if draft.given is None else [guess.tokens for guess in draft.given]
        described = [_described(*one) for one in zip(rows, plan.draft_lengths, given, strict=True)]
        stops = (plan.min_confidence, plan.stop) if plan.exit_layer else (0.0, None)
        assert runner is not None
        done = runner.round(self.cache, described, plan.exit_layer or 0, *stops, plan.reads_confidence)
        if done is None:
            return self._otherwise.round(rows, draft)
        verdicts = [_verdict(one) for one in done]
        verdicts = draft.with_matches(verdicts)
        seconds.lap("verify")
        return Executed(plan.exit_layer if any(one.drafted for one in done) else None, verdicts, seconds)


def _described(row: Row, length: int, given: Sequence[int]) -> RoundRow:
    how, content = row.request.sampling, row.content
    return RoundRow(
        row.pages, len(content), content[-1], row.room, sorted(row.stopper.ends), length, given,
        how.temperature, how.top_k, how.top_p, how.min_p, how.seed,
    )  # fmt: skip


def _verdict(one: RowRound) -> Verdict:
    return Verdict(one.drafted, range(one.accepted + 1), one.block, None, None, confidences=one.confidences)
