"""Whole rounds at once, from drafts to acceptance: which rounds may be, and what is told of their rows.

On CUDA a runner replays a recording; where layers are compiled for the processor, one compiled call does it, and more
of them where they are planned alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from selfspec.control.laps import Seconds
from selfspec.control.plan import CONFIDENCE_EDGES, LOOKUP, Plan
from selfspec.decoding.afterwards import with_shadows
from selfspec.decoding.ahead import Ahead, Coming
from selfspec.decoding.choose import stops_of
from selfspec.decoding.picker import Picker, told_of
from selfspec.decoding.row import Row
from selfspec.decoding.verdict import Verdict
from selfspec.device.whole import RoundRow, RowRound
from selfspec.target.cache import PagedCache, Span, Tree
from selfspec.target.compiled import CompiledBody
from selfspec.target.round_room import Beside, Done, Drafter, Given, Judged, Seen
from selfspec.target.stack import Stack


def whole_round(stack: Stack, cache: PagedCache, rows: Sequence[Row], plan: Plan) -> list[Verdict] | None:
    """What became of every row; None for a round that asks for what the device has not.

    Second choices are left out, since the host would have to wait for every drafted token to know where they belong.
    """
    runner = stack.runner
    if runner is None or len(rows) > runner.most_rows or plan.trees is not None or not _is_plain(rows, plan):
        return None
    lengths = (0,) * len(rows) if plan.exit_layer is None else plan.draft_lengths
    told = [_row(row, length, plan) for row, length in zip(rows, lengths, strict=True)]
    stops = (plan.min_confidence, plan.stop) if plan.exit_layer else (0.0, None)
    done = runner.round(cache, told, plan.exit_layer or 0, *stops, plan.reads_confidence)
    return None if done is None else [_verdict(one) for one in done]


def _is_plain(rows: Sequence[Row], plan: Plan) -> bool:
    """Whether a round asks for nothing but its tokens: no processors, kept logits, looks at layers or divergences."""
    if plan.asks_for_more:
        return False
    return not any(row.request.logits_processor or row.request.keep_logits for row in rows)


def compiled_round(
    stack: Stack,
    cache: PagedCache,
    rows: Sequence[Row],
    plan: Plan,
    picker: Picker,
    seconds: Seconds,
    ahead: Ahead | None = None,
) -> list[Verdict] | None:
    """What became of every row, by one compiled call; None for a round that asks for what that has not.

    Args:
        ahead: who says how many rounds are decoded at once, and takes what became of the later ones.
    """
    rounds, looks = picker.rounds, plan.shadow is not None
    if rounds is None or not _is_plain(rows, replace(plan, shadow=None) if looks else plan):
        return None
    seen = _seen(stack, rows, plan) if looks else None
    if looks and seen is None:
        return None
    ahead = None if looks else ahead  # there is room for what one round leaves, drafted as planned
    given = _given(rows, plan) if plan.exit_layer == LOOKUP else []
    usual = plan if ahead is None else ahead.usual
    drafter = _drafter(stack, usual) if usual.exit_layer else None
    if usual.exit_layer and drafter is None and not given:
        return None
    is_ready = drafter is not None or not usual.exit_layer
    further = ahead.further(rows) if ahead is not None and is_ready else None
    if further is None and given:
        drafter = None
    lengths = (0,) * len(rows) if drafter is None else usual.draft_lengths
    spans = [Span(row.pages, len(row.content) - 1, n) for row, n in zip(rows, lengths, strict=True)]
    last, how = [row.content[-1] for row in rows], told_of([row.request.sampling for row in rows])
    done = rounds.run(cache, spans, last, how, [row.room - 1 for row in rows], drafter, given, further, seen)
    coming = [Coming.of([_judged(row) for row in one.rows], one.steps, one.taken, _found(one)) for one in done]
    seconds.laps([("rest", 0.0), *coming[0].parts], sum([sum(one.stages) for one in coming[1:]]))
    if ahead is not None and further is not None:
        ahead.put(rows, coming, done)
    if seen is None:
        return coming[0].verdicts
    verdicts = with_shadows(stack, picker, rows, plan, coming[0].verdicts, [seen.hidden], seen.logits)
    seconds.lap("shadow")
    return verdicts


def _seen(stack: Stack, rows: Sequence[Row], plan: Plan) -> Seen | None:
    """Where a round that looks at layers leaves what it sees; None where that is much."""
    if plan.shadow is None or not isinstance(stack.lean, CompiledBody):
        return None
    beside = 0 if plan.second_choices is None else plan.second_choices.most
    return Seen.of(stack.lean, plan.shadow.layers, sum([1 + n + beside for n in plan.draft_lengths]))


def _drafter(stack: Stack, plan: Plan) -> Drafter | None:
    """Who drafts; None where that is not compiled."""
    assert plan.exit_layer is not None
    rounded, vocab = plan.draft_bits is not None, plan.draft_vocab if any(plan.draft_lengths) else None
    head = stack.packed_head(plan.exit_layer, vocab, rounded)
    if head is None:
        return None
    rule = plan.second_choices
    beside = rule and _beside(tuple(rule.right), tuple(rule.second), *rule[2:])
    return Drafter(plan.exit_layer, head, stops_of(plan), plan.reads_confidence, rounded, beside)


@lru_cache(maxsize=64)
def _beside(right: Sequence[float], second: Sequence[float], least: float, most: int, enough: float) -> Beside:
    """The same object of equal rules, see `SecondChoices`."""
    return Beside(CONFIDENCE_EDGES, right, second, least, enough, most)


def _given(rows: Sequence[Row], plan: Plan) -> list[Given | None]:
    """What is drafted of every row without a layer."""
    if plan.trees is not None:
        return [None if tree is None else Given(*tree) for tree in plan.trees]
    found = [row.guesser.lookup.draft(n).tokens for row, n in zip(rows, plan.draft_lengths, strict=True)]
    return [Given(tokens, range(len(tokens))) for tokens in found]


def _found(one: Done) -> list[list[int]] | None:
    """What every row drafted without a layer."""
    return [row.drafted for row in one.rows] if one.is_given else None


def _judged(one: Judged) -> Verdict:
    tree = None if one.parents is None else Tree((-1, *one.parents))
    chain = 0 if tree is None else one.chain
    return Verdict(one.drafted, one.path, one.block, None, None, tree, chain, confidences=tuple(one.sure))


def _verdict(one: RowRound) -> Verdict:
    return Verdict(one.drafted, range(one.accepted + 1), one.block, None, None, confidences=one.confidences)


def _row(row: Row, length: int, plan: Plan) -> RoundRow:
    given = row.guesser.lookup.draft(length).tokens if plan.exit_layer == LOOKUP else ()
    drafts = len(given) if plan.exit_layer == LOOKUP else length
    how, content = row.request.sampling, row.content
    return RoundRow(
        row.pages, len(content), content[-1], row.room, sorted(row.stopper.eos), drafts, given,
        how.temperature, how.top_k, how.top_p, how.min_p, how.seed,
    )  # fmt: skip
