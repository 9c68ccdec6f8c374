"""What a round is looked at for once it is decided: shadow picks, divergences, and lessons for exit heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from selfspec.control.plan import Plan
from selfspec.executors.draft_picks import DraftPicker
from selfspec.executors.penalties import Penalties
from selfspec.executors.picker import Picker
from selfspec.executors.rows import Row
from selfspec.executors.shadow import part_of, shadow_picks
from selfspec.executors.verdict import Verdict
from selfspec.model.stack import Stack

# Is given, of one exit layer, what a head could learn from: hidden states `[n, hidden_size]` after it, and the target's
# logits `[n, vocab]` at the same positions. Both are copies.
Teach = Callable[[int, Tensor, Tensor], None]


def hand_on(
    teach: Teach,
    rows: Sequence[Row],
    plan: Plan,
    verdicts: Sequence[Verdict],
    hidden: Tensor,  # [N, hidden_size] after the exit
    taps: Sequence[Tensor],  # as in `with_shadows`
    logits: Tensor,
) -> None:
    """Lessons from where each row's draft was refused; where no layer drafted, from every row that was looked at.

    Logits are those before penalties. Rows with processors give none: what they pick holds for their requests only.
    """
    starts, lessons = _starts(verdicts), []
    for i, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
        if plan.exit_layer:
            refused, node = verdict.num_right < (verdict.chain or len(verdict.drafted)), verdict.num_right
        else:
            refused, node = bool(taps), verdict.path[-1]
        if refused and not row.request.logits_processor:
            lessons.append(starts[i] + node)
    if not lessons:
        return
    at = torch.tensor(lessons, device=logits.device)
    told = logits[at]
    if plan.exit_layer:
        teach(plan.exit_layer, hidden[at], told)
    layers = plan.shadow.layers if plan.shadow is not None else ()
    for layer, seen in zip(layers, [one for part in taps for one in part], strict=True):
        teach(layer, seen[at], told)


def _starts(verdicts: Sequence[Verdict]) -> list[int]:
    """Where each row's tokens begin in the packed verification."""
    starts = [0]
    for verdict in verdicts:
        starts.append(starts[-1] + len(verdict.drafted) + 1)
    return starts[:-1]


def with_divergences(verdicts: list[Verdict], chooser: DraftPicker, logits: Tensor) -> list[Verdict]:
    out = []
    for i, (at, verdict) in enumerate(zip(_starts(verdicts), verdicts, strict=True)):
        judged = min(verdict.num_right + 1, verdict.chain or len(verdict.drafted))
        out.append(verdict._replace(divergences=chooser.divergences(i, logits[at : at + judged]) if judged else ()))
    return out


def with_shadows(
    stack: Stack,
    picker: Picker,
    rows: Sequence[Row],
    plan: Plan,
    verdicts: list[Verdict],
    taps: Sequence[Tensor],  # [some of the plan's layers, N, hidden_size], in order: all of them together
    logits: Tensor,
    penalties: Penalties | None = None,
) -> list[Verdict]:
    """Look at the judged positions of the rows the plan names; positions beyond a rejection say nothing."""
    assert plan.shadow is not None
    starts, out = _starts(verdicts), list(verdicts)
    index: list[int] = []  # packed positions to look at, and what the target picked there
    judged: list[int] = []
    cuts: list[tuple[int, int, int]] = []  # row, and its part of the index
    for i in plan.shadow.rows:
        if rows[i].request.logits_processor:
            continue  # asking a processor about every layer's logits would cost more than it tells
        count = min(verdicts[i].accepted + 1, plan.shadow.max_columns)
        cuts.append((i, len(index), len(index) + count))
        index += [starts[i] + node for node in verdicts[i].path[:count]]
        judged += verdicts[i].block[:count]
    if not index:
        return out
    # Of a single row's chain they follow one another, and need not be gathered.
    is_run = index == list(range(index[0], index[0] + len(index)))
    at = slice(index[0], index[-1] + 1) if is_run else torch.tensor(index, device=logits.device)
    where = [len(rows[i].content) + column for i, low, high in cuts for column in range(high - low)]
    samplings = [rows[i].request.sampling for i, low, high in cuts for _ in range(high - low)]
    parts = [part[:, at] for part in taps]
    hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
    picks = torch.tensor(judged, device=logits.device)
    exact, layers = plan.shadow.exact, plan.shadow.layers
    penalty, target = None, logits[at]
    if penalties is not None:
        counts = {i: high - low for i, low, high in cuts}
        penalty = penalties.along([verdict.block[: counts.get(i, 0)] for i, verdict in enumerate(verdicts)])
        target = penalty.applied(target)
    seen = shadow_picks(stack, picker, layers, hidden, samplings, where, target, picks, exact, penalty)
    for i, low, high in cuts:
        out[i] = out[i]._replace(shadow=part_of(seen, low, high))
    return out
