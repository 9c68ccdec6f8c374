"""Drafts on a trace: how long a plan's draft gets before it stops, and how much of it is right."""

from __future__ import annotations

from collections.abc import Sequence

from eval.traces import WRONG_STEPS, Trace
from selfspec.control.acceptance import likely_seconds
from selfspec.control.plan import Plan, SecondChoices, confidence_bin
from selfspec.control.rows import RowOutcome
from selfspec.drafting.prompt_lookup import Guess, num_right


def draft(trace: Trace, at: int, plan: Plan, length: int) -> RowOutcome:
    """The outcome of a draft of `length` tokens from output position `at`.

    Raises:
        ValueError: the plan reads confidences of more tokens after a wrong one than the trace has.
    """
    if plan.exit_layer is None or length == 0:
        return RowOutcome(0, 0, 0)
    line = plan.exit_layer - 1
    accepted = _num_right(trace, line, at, length, _has_copies(trace, plan))
    confidences = tuple(_sure(trace, at, length, plan)) if plan.reads_confidence else ()
    if plan.reads_confidence and len(confidences) < length:
        raise ValueError(f"a draft goes on for {length - accepted - 1} tokens after a wrong one, beyond the trace")
    judged = min(accepted + 1, length)
    away = tuple(trace.divergences[line, at : at + judged].tolist()) if plan.keep_divergence else ()
    outcome = RowOutcome(0, length, accepted, confidences, away)
    return outcome if plan.second_choices is None else _with_second(trace, at, plan.second_choices, line, outcome)


def draft_lengths(places: Sequence[tuple[Trace, int]], plan: Plan) -> list[int]:
    """How many tokens each row drafts, from output position `at` of its trace, until a stop of the plan ends it.

    Raises:
        ValueError: the plan reads confidences of more tokens after a wrong one than the trace has.
    """
    if plan.exit_layer is None:
        return [0] * len(places)
    lengths = list(plan.draft_lengths)
    if plan.stop is None and plan.min_confidence <= 0:
        return lengths
    sure = [_sure(trace, at, n, plan) for (trace, at), n in zip(places, lengths, strict=True)]
    survival = [1.0] * len(places)
    live = [i for i, length in enumerate(lengths) if length]
    step = 0
    while live:  # all rows draft in lock step: what one does may depend on the others
        for i in live:
            if step >= len(sure[i]):
                raise ValueError(f"a draft goes on for {WRONG_STEPS} tokens after a wrong one, beyond the trace")
        if plan.stop is not None:
            for i in live:
                survival[i] *= plan.stop.calibration[confidence_bin(sure[i][step])]
            going = [plan.stop.goes_on([survival[i] for i in live])] * len(live)
        else:
            going = [sure[i][step] >= plan.min_confidence for i in live]
        step += 1
        for i, on in zip(live, going, strict=True):
            lengths[i] = lengths[i] if on else step
        live = [i for i in live if lengths[i] > step]
    return lengths


def by_lookup(request_id: int, guess: Guess, rest: Sequence[int]) -> RowOutcome:
    """The outcome of a draft by lookup where the output goes on with `rest`."""
    match, is_stored = (guess.match, guess.is_stored) if guess.tokens else (0, False)
    drafted, right = len(guess.tokens), num_right(guess.tokens, rest)
    return RowOutcome(request_id, drafted, right, match=match, is_stored=is_stored)


def _with_second(trace: Trace, at: int, rule: SecondChoices, line: int, outcome: RowOutcome) -> RowOutcome:
    """The outcome with the second choices that were drafted beside the draft."""
    room = len(trace.tokens) - at
    found = likely_seconds(rule, outcome.confidences, min(rule.most, room - 1 - outcome.num_drafted))
    second = bool(trace.seconds[line, at + outcome.num_accepted]) if outcome.num_accepted in found else None
    return outcome._replace(second=second, num_beside=len(found))


def _has_copies(trace: Trace, plan: Plan) -> bool:
    """Whether the plan drafts with copies and the trace tells what they draft; else they are taken to draft as layers.

    A plan that keeps divergences drafts with the layers themselves.
    """
    if plan.draft_bits is None or not plan.exit_layer or plan.keep_divergence:
        return False
    return plan.exit_layer <= len(trace.copied)


def _num_right(trace: Trace, line: int, at: int, length: int, copies: bool) -> int:
    """How many tokens are right of those that a layer, or the copies, draft from output position `at` on."""
    if copies:
        right, recorded = int(trace.copied_right[line, at]), trace.copied.shape[2]
        if right == recorded < length:
            raise ValueError(f"copies draft {length} tokens, beyond the trace, which has {recorded}")
        return min(length, right)
    hits = trace.hits[line, at : at + length]
    return length if hits.all() else int(hits.argmin())


def _sure(trace: Trace, at: int, length: int, plan: Plan) -> list[float]:
    """The confidences of what the plan's layer, or the copies, draft from output position `at` on."""
    assert plan.exit_layer is not None
    line = plan.exit_layer - 1
    if _has_copies(trace, plan):
        sure: list[float] = trace.copied[line, at, :length].tolist()
        return sure
    return _confidences(trace, line, at, length)


def _confidences(trace: Trace, line: int, at: int, length: int) -> list[float]:
    """Of a draft of `length` tokens: on the output, then on what the layer goes on to write after a wrong token."""
    hits, end = trace.hits[line, at : at + length], at + length
    wrong_at = end if hits.all() else at + int(hits.argmin())
    sure: list[float] = trace.confidences[line, at : min(wrong_at + 1, end)].tolist()
    if wrong_at + 1 < end:
        sure += trace.wrong[line, wrong_at, : end - wrong_at - 1].tolist()
    return sure
