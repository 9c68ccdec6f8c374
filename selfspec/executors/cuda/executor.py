"""`CudaExecutor`: runs rounds of small batches as one recording each, from drafting to acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from selfspec.control.plan import Plan
from selfspec.executors.cuda.round_inputs import RoundRow, RowRound
from selfspec.executors.program import Executed, Executor, RoundDraft
from selfspec.executors.rows import Row
from selfspec.executors.verdict import Verdict


class CudaExecutor(Executor):
    """Replays recorded rounds of the stack's runner.

    It does not serve rows with penalties, log-probabilities or logits processors, nor shadow picks.

    Args:
        fallback: runs the rounds that cannot be recorded, because of their shape or of the model.
    """

    def __init__(self, fallback: Executor) -> None:
        super().__init__(fallback.stack, fallback.cache, fallback.picker, fallback.new_seconds)
        self._fallback = fallback

    def serves(self, rows: Sequence[Row], plan: Plan) -> bool:
        """Whether the runner may record rounds of this plan; see `Executor.serves`."""
        runner = self.stack.runner
        if runner is None or len(rows) > runner.max_rows or plan.shadow is not None or plan.keep_divergence:
            return False
        requests = [row.request for row in rows]
        if any(one.sampling.penalizes or one.logprobs is not None for one in requests):
            return False
        return not any(one.logits_processor or one.keep_logits for one in requests)

    @torch.inference_mode()
    def round(self, rows: Sequence[Row], draft: RoundDraft) -> Executed:
        """Run one round from a recording, or by the fallback; see `Executor.round`."""
        plan, seconds, runner = draft.plan, self.new_seconds(), self.stack.runner
        given = [()] * len(rows) if draft.given is None else [guess.tokens for guess in draft.given]
        round_rows = [_round_row(*one) for one in zip(rows, plan.draft_lengths, given, strict=True)]
        how: tuple[Any, ...] = (0.0, None)
        if plan.exit_layer:
            how = (plan.min_confidence, plan.stop, plan.reads_confidence, plan.draft_vocab, plan.second_choices)
        assert runner is not None
        done = runner.round(self.cache, round_rows, plan.exit_layer or 0, *how)
        if done is None:
            return self._fallback.round(rows, draft)
        verdicts = [_verdict(one) for one in done]
        verdicts = draft.with_matches(verdicts)
        seconds.lap("verify")
        return Executed(plan.exit_layer if any(one.drafted for one in done) else None, verdicts, seconds)


def _round_row(row: Row, length: int, given: Sequence[int]) -> RoundRow:
    sampling, content = row.request.sampling, row.content
    return RoundRow(
        row.pages, len(content), content[-1], row.room, sorted(row.stopper.ends), length, given,
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed,
    )  # fmt: skip


def _verdict(row: RowRound) -> Verdict:
    return Verdict(row.drafted, row.path, row.block, None, None, row.tree, row.chain, row.confidences)
