"""What is computed once a round is decided: shadow picks and divergences."""

from __future__ import annotations

from collections import abc
from itertools import accumulate

import torch
from torch import Tensor

from selfspec.control.plan import ShadowPlan
from selfspec.core import RowRound
from selfspec.executors.masks import mask_of, penalty_of
from selfspec.executors.penalties import Penalties
from selfspec.executors.picker import Picker
from selfspec.executors.shadow import part_of, shadow_picks
from selfspec.model.split_model import SplitModel


def _starts(outputs: list[RowRound]) -> list[int]:
    """Where each row's tokens begin in the packed verification."""
    sizes = [len(output.drafted) + 1 for output in outputs]
    return list(accumulate(sizes[:-1], initial=0))


def add_divergences(outputs: list[RowRound], drafts: abc.Sequence[abc.Sequence[Tensor]], scores: Tensor) -> None:
    """Report KL(target || draft) in nats at the judged positions.

    Args:
        drafts: per row, the draft's logits `[vocab]` at its positions.
        scores: `[N, vocab]`, what the target picked from.
    """
    for at, output, draft in zip(_starts(outputs), outputs, drafts, strict=True):
        judged = min(output.num_accepted + 1, output.num_drafted)
        if judged:
            log_p = scores[at : at + judged].log_softmax(-1)
            log_q = torch.stack([*draft[:judged]]).log_softmax(-1)
            terms = torch.where(log_p > float("-inf"), log_p.exp() * (log_p - log_q), 0.0)  # banned tokens say nothing
            output.divergences = tuple(terms.sum(-1).tolist())


def add_shadow_picks(
    split: SplitModel,
    picker: Picker,
    shadow: ShadowPlan,
    outputs: list[RowRound],
    taps: abc.Sequence[Tensor],  # [some of the plan's layers, N, hidden_size], in order: all of them together
    logits: Tensor,
    penalties: Penalties | None = None,
    last: Tensor | None = None,  # [N, hidden_size], final states one token before
) -> None:
    """Probe the judged positions of the rows that the plan names; positions beyond a rejection say nothing."""
    starts = _starts(outputs)
    index: list[int] = []  # packed positions that are probed, and what the target picked there
    picked: list[int] = []
    cuts: list[tuple[int, int, int]] = []  # row, and its part of the index
    for i in shadow.rows:
        if outputs[i].sequence.has_processors:
            continue  # asking a processor about every layer's logits would cost more than it tells
        count = min(outputs[i].num_accepted + 1, shadow.max_columns)
        cuts.append((i, len(index), len(index) + count))
        index += range(starts[i], starts[i] + count)
        picked += outputs[i].token_ids[:count]
    if not index:
        return
    # Those of a single row follow one another, and need not be gathered.
    is_run = index == list(range(index[0], index[0] + len(index)))
    at = slice(index[0], index[-1] + 1) if is_run else torch.tensor(index, device=logits.device)
    lengths = [output.sequence.num_tokens for output in outputs]
    positions = [lengths[i] + column for i, low, high in cuts for column in range(high - low)]
    params = [outputs[i].sequence.request.params for i, low, high in cuts for _ in range(high - low)]
    parts = [part[:, at] for part in taps]
    hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
    picks = torch.tensor(picked, device=logits.device)
    penalty, target = None, logits[at]
    if penalties is not None:
        counts = {i: high - low for i, low, high in cuts}
        penalty = penalties.along([output.token_ids[: counts.get(i, 0)] for i, output in enumerate(outputs)])
    pairs = [(outputs[i], column) for i, low, high in cuts for column in range(high - low)]
    penalty = penalty_of([mask_of(one.sequence, one.token_ids[:column]) for one, column in pairs], target, penalty)
    if penalty is not None:
        target = penalty.applied(target)
    last, given = None if last is None else last[at], (hidden, params, positions, target, picks)
    seen = shadow_picks(split, picker, shadow.layers, *given, shadow.exact, penalty, last)
    for i, low, high in cuts:
        outputs[i].shadow = part_of(seen, low, high)
