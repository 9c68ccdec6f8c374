"""ShadowPicks picks: the tokens that other layers than the exit layer would have picked at the verified positions.

They need no pass over layers, since the verification computes the hidden states. They rarely need the whole head: a
layer counts as right if it prefers the target's pick to the target's other most probable tokens and to a fixed sample
of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.core import SamplingParams, ShadowPicks
from selfspec.executors.penalties import Penalty
from selfspec.executors.pick import filtered
from selfspec.executors.picker import Picker, packed_params
from selfspec.kernels.gumbel import gumbel
from selfspec.model.kv_cache import tensor_of
from selfspec.model.shortlist import NUM_TOP
from selfspec.model.stack import Stack

CHUNK = 256  # positions times layers per product with the whole head, if one layer has fewer positions


def shadow_picks(
    stack: Stack,
    picker: Picker,
    layers: Sequence[int],
    hidden: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    target: Tensor,
    target_picks: Tensor,
    exact: bool = False,
    penalty: Penalty | None = None,
) -> ShadowPicks:
    """Whether each layer would have picked the target's token at N positions, with the noise and filters of their rows.

    Args:
        hidden: `[layers, N, hidden_size]`, after each of the layers.
        params: per position, how its row picks.
        positions: per position, the index in its row's content of the token picked there.
        target: `[N, vocab]`, the target's logits, after penalties.
        target_picks: int64 `[N]`, the target's picks.
        exact: compute logits over the whole vocabulary.
        penalty: penalties at the N positions.
    """
    hits, confidences = None, None
    if not exact and picker.is_compiled and stack.compiled is not None:
        how = packed_params(params)
        num_likely = min(NUM_TOP, target.shape[1]) - 1
        through = stack.through_heads(hidden, layers)
        found = stack.compiled.shadow_picks(
            through, how, positions, target, target_picks, num_likely, stack.others, penalty
        )
        hits, confidences = (None, None) if found is None else found
    elif not exact:
        hits, confidences = over_shortlist(stack, layers, hidden, params, positions, target, target_picks, penalty)
    if hits is None or confidences is None:
        hits, confidences = _over_vocabulary(stack, picker, layers, hidden, params, positions, target_picks, penalty)
    if hits.device.type == "cpu":
        return ShadowPicks(tuple(layers), hits.numpy(), confidences.float().numpy())
    on_host = torch.stack([hits.float(), confidences.float()]).cpu().numpy()  # one copy to the host
    return ShadowPicks(tuple(layers), on_host[0] > 0, on_host[1])


def over_shortlist(
    stack: Stack,
    layers: Sequence[int],
    hidden: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    target: Tensor,
    target_picks: Tensor,
    penalty: Penalty | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Hits, bool, and confidences, fp32, `[layers, N]`, from logits of few tokens; None if the head's kind is unknown.

    The arguments are those of `shadow_picks`.
    """
    own = target_picks[:, None]
    likely = target.scatter(1, own, float("-inf")).topk(min(NUM_TOP, target.shape[1]) - 1).indices
    top = torch.cat((own, likely), 1)  # [N, T]; the target's pick comes first
    logits = stack.short_logits(hidden, top, layers)
    if logits is None:
        return None, None
    if penalty is not None:
        logits = penalty.applied(logits, torch.cat((top, stack.others.expand(len(top), -1)), 1))
    is_duplicate = (stack.others[:, None] == top[:, None, :]).any(-1)  # [N, others]
    num_top, num_others = top.shape[1], len(stack.others)
    logits[:, :, num_top:].masked_fill_(is_duplicate, float("-inf"))
    # The number of tokens that each token of the sample represents:
    represented = (target.shape[1] - num_top) / (num_others - is_duplicate.sum(-1)).clamp(min=1)
    weights = torch.ones_like(logits[0])
    weights[:, num_top:] = represented.clamp(min=1)[:, None]
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for i, one in enumerate(params):
        groups.setdefault(one.filters, []).append(i)
    for members in groups.values():
        if not params[members[0]].is_greedy:
            at = tensor_of(members, logits.device)
            tokens = torch.cat((top[at], stack.others.expand(len(members), -1)), 1)
            seeds = tensor_of([params[i].seed for i in members], logits.device)
            at_positions = tensor_of([positions[i] for i in members], logits.device)
            noise = gumbel(seeds, at_positions, target.shape[1], tokens)
            kept = filtered(logits[:, at].flatten(0, 1), params[members[0]]).view(len(logits), len(members), -1)
            logits[:, at] = kept + noise
            weights[at] = 1  # with noise, few tokens dominate, so that a sample does not represent the rest
    best = logits.amax(-1)
    confidences = 1 / ((logits - best[..., None]).exp() * weights).sum(-1)
    return logits[..., 0] >= best, confidences


def _over_vocabulary(
    stack: Stack,
    picker: Picker,
    layers: Sequence[int],
    hidden: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    target_picks: Tensor,
    penalty: Penalty | None = None,
) -> tuple[Tensor, Tensor]:
    """Hits and confidences `[layers, N]` from logits of the whole vocabulary."""
    count = hidden.shape[1]
    per_call = max(1, CHUNK // count)
    hits, confidences = [], []
    for first in range(0, len(layers), per_call):
        some = layers[first : first + per_call]
        logits = stack.early_logits(hidden[first : first + per_call], some)
        logits = logits if penalty is None else penalty.applied(logits)
        picks = picker(logits.flatten(0, 1), [*params] * len(some), [*positions] * len(some), with_confidence=True)
        assert picks.confidences is not None
        hits.append(picks.tokens == target_picks.repeat(len(some)))
        confidences.append(picks.confidences)
    return torch.cat(hits).view(-1, count), torch.cat(confidences).view(-1, count)


def part_of(shadow: ShadowPicks, start: int, stop: int) -> ShadowPicks:
    """The shadow picks at positions [start, stop)."""
    return ShadowPicks(shadow.layers, shadow.hits[:, start:stop], shadow.confidences[:, start:stop])
