"""Whole rounds on the device: which rounds may be, and what the runner is told of their rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selfspec.control.plan import LOOKUP, Plan
from selfspec.decoding.row import Row
from selfspec.decoding.verdict import Verdict
from selfspec.device.whole import RoundRow, RowRound
from selfspec.drafting.recycle import NUM_CANDIDATES
from selfspec.target.cache import PagedCache
from selfspec.target.stack import Stack


def whole_round(
    stack: Stack, cache: PagedCache, rows: Sequence[Row], plan: Plan, recycles: bool
) -> list[Verdict] | None:
    """What became of every row; None for a round that asks for what the device has not.

    That is: processors and kept logits, which are the host's, a look at other layers or at divergences, and trees.
    Second choices are left out, since the host would have to wait for every drafted token to know where they belong.
    """
    runner = stack.runner
    if runner is None or len(rows) > runner.most_rows or plan.shadow is not None or plan.keep_divergence:
        return None
    if plan.trees is not None:
        return None
    if any(row.request.logits_processor or row.request.keep_logits for row in rows):
        return None
    lengths = (0,) * len(rows) if plan.exit_layer is None else plan.draft_lengths
    told = [_row(row, length, plan) for row, length in zip(rows, lengths, strict=True)]
    stops = (plan.min_confidence, plan.stop) if plan.exit_layer else (0.0, None)
    num_likely = min(NUM_CANDIDATES, stack.vocab_size) if recycles else 0
    done = runner.round(cache, told, plan.exit_layer or 0, *stops, plan.reads_confidence, num_likely)
    return None if done is None else [_verdict(one) for one in done]


def _verdict(one: RowRound) -> Verdict:
    likely = np.array(one.likely, np.int64) if one.likely else None
    return Verdict(
        one.drafted, range(one.accepted + 1), one.block, None, None, confidences=one.confidences, likely=likely
    )


def _row(row: Row, length: int, plan: Plan) -> RoundRow:
    given = row.guesser.lookup.draft(length).tokens if plan.exit_layer == LOOKUP else ()
    drafts = len(given) if plan.exit_layer == LOOKUP else length
    how, content = row.request.sampling, row.content
    return RoundRow(
        row.pages, len(content), content[-1], row.room, sorted(row.stopper.eos), drafts, given,
        how.temperature, how.top_k, how.top_p, how.min_p, how.seed,
    )  # fmt: skip
