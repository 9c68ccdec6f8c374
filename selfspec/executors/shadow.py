"""Shadow picks: the tokens that other layers than the exit layer would have picked at the verified positions.

They need no pass over layers, since the verification computes the hidden states. They rarely need the whole head: a
layer counts as right if it prefers the target's pick to the target's other most probable tokens and to a fixed sample
of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.core import ShadowPicks
from selfspec.executors.penalties import Penalty
from selfspec.executors.picker import Picker, packed_params
from selfspec.kernels.gumbel import gumbel
from selfspec.kernels.pick import filtered
from selfspec.model.kv_cache import tensor_of
from selfspec.model.shortlist import NUM_TOP
from selfspec.model.split_model import SplitModel
from selfspec.params import SamplingParams

CHUNK = 256  # positions times layers per product with the whole head


def shadow_picks(
    split: SplitModel,
    picker: Picker,
    layers: Sequence[int],
    hidden: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    target: Tensor,
    target_picks: Tensor,
    exact: bool = False,
    penalty: Penalty | None = None,
    last: Tensor | None = None,
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
        last: `[N, hidden_size]`, final states one token before each position, which exit heads read: a layer counts as
            a draft that begins at that position. None: unknown.
    """
    hidden, found = split.through_heads(hidden, layers, last), None
    if not exact and picker.is_compiled and split.compiled is not None:
        num_likely = min(NUM_TOP, target.shape[1]) - 1
        packed = packed_params(params)
        found = split.compiled.shadow_picks(
            hidden, packed, positions, target, target_picks, num_likely, split.others, penalty
        )
    if found is None:
        found = by_torch(split, hidden, params, positions, target, target_picks, exact, penalty)
    hits, confidences = found
    if hits.device.type == "cpu":
        return ShadowPicks(tuple(layers), hits.numpy(), confidences.float().numpy())
    on_host = torch.stack([hits.float(), confidences.float()]).cpu().numpy()  # one copy to the host
    return ShadowPicks(tuple(layers), on_host[0] > 0, on_host[1])


def by_torch(
    split: SplitModel,
    hidden: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    target: Tensor,
    target_picks: Tensor,
    exact: bool = False,
    penalty: Penalty | None = None,
) -> tuple[Tensor, Tensor]:
    """Hits, bool, and confidences, fp32, `[K, N]`; the arguments are those of `shadow_picks`.

    `hidden`, `[K, N, hidden_size]`, are states of K layers after their exit heads.

    They come from logits of few tokens; of the whole vocabulary where `exact` asks for it, or where the model's head is
    no plain linear layer.
    """
    own, vocab_size = target_picks[:, None], target.shape[1]
    tokens = logits = None
    if not exact:
        likely = target.scatter(1, own, float("-inf")).topk(min(NUM_TOP, vocab_size) - 1).indices
        tokens = torch.cat((own, likely, split.others.expand(len(own), -1)), 1)  # [N, T]
        logits = split.short_logits(hidden, tokens[:, : likely.shape[1] + 1])
    if logits is None and len(hidden) > 1 and len(hidden) * len(own) > CHUNK:
        rest = params, positions, target, target_picks, True, penalty
        parts = [by_torch(split, part, *rest) for part in hidden.tensor_split(2)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    if logits is None:
        tokens, logits = None, split.head_logits(hidden.flatten(0, 1), True).view(*hidden.shape[:2], -1)
    logits = logits if penalty is None else penalty.applied(logits, tokens)
    weights = logits.new_ones(logits.shape[1:])
    if tokens is not None:
        _weigh(logits, weights, tokens, len(split.others), vocab_size)
    for members in _by_filters(params):
        if not params[members[0]].is_greedy:
            at = tensor_of(members, logits.device)
            seeds = tensor_of([params[i].seed for i in members], logits.device)
            where = tensor_of([positions[i] for i in members], logits.device)
            noise = gumbel(seeds, where, vocab_size, None if tokens is None else tokens[at])
            kept = filtered(logits[:, at].flatten(0, 1), params[members[0]]).view(len(logits), len(members), -1)
            logits[:, at] = kept + noise
            weights[at] = 1  # with noise, few tokens dominate, so that a sample does not represent the rest
    best = logits.amax(-1)
    hits = logits[..., 0] >= best if tokens is not None else logits.argmax(-1) == target_picks
    return hits, 1 / ((logits - best[..., None]).exp() * weights).sum(-1)


def _weigh(logits: Tensor, weights: Tensor, tokens: Tensor, num_others: int, vocab_size: int) -> None:
    """Mask what the sample repeats, and let its other tokens count for as many as each represents."""
    num_top = tokens.shape[1] - num_others
    is_duplicate = (tokens[:, num_top:, None] == tokens[:, None, :num_top]).any(-1)  # [N, others]
    logits[:, :, num_top:].masked_fill_(is_duplicate, float("-inf"))
    represented = (vocab_size - num_top) / (num_others - is_duplicate.sum(-1)).clamp(min=1)
    weights[:, num_top:] = represented.clamp(min=1)[:, None]


def _by_filters(params: Sequence[SamplingParams]) -> list[list[int]]:
    """The positions whose rows have the same filters, together."""
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for i, one in enumerate(params):
        groups.setdefault(one.filters, []).append(i)
    return list(groups.values())


def part_of(shadow: ShadowPicks, start: int, stop: int) -> ShadowPicks:
    """The shadow picks at positions [start, stop)."""
    return ShadowPicks(shadow.layers, shadow.hits[:, start:stop], shadow.confidences[:, start:stop])
