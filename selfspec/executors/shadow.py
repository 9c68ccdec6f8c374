"""Shadow picks: what layers that were not the exit would have picked at positions the target has judged.

No layer runs for it: the hidden states are there already. Nor, as a rule, does the whole head: a layer is right if it
prefers the target's pick to the target's other likeliest tokens and to a fixed sample of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.control.rows import Shadow
from selfspec.executors.cpu.body import CompiledBody
from selfspec.executors.cpu.shadow import can_compute_shadow, look
from selfspec.executors.penalties import Penalty
from selfspec.executors.pick import Sampling, filtered
from selfspec.executors.picker import Picker, told_of
from selfspec.kernels.gumbel import gumbel
from selfspec.model.shortlist import NUM_TOP
from selfspec.model.stack import Stack

CHUNK = 256  # rows of one vocabulary product, as far as one layer's positions are fewer


def shadow_picks(
    stack: Stack,
    picker: Picker,
    layers: Sequence[int],
    hidden: Tensor,  # [layers, N, hidden_size], after each of them
    samplings: Sequence[Sampling],  # per position
    positions: Sequence[int],  # [N]: index in its row's content of the token picked there
    target: Tensor,  # [N, vocab]: the target's logits, after penalties
    judged: Tensor,  # int64 [N]: its picks
    exact: bool = False,
    penalty: Penalty | None = None,
) -> Shadow:
    """What each layer would have picked at N positions, with the noise and filters of their rows."""
    hits, sure = None, None
    if (
        not exact
        and picker.is_compiled
        and isinstance(stack.compiled, CompiledBody)
        and can_compute_shadow(stack.compiled)
    ):
        hits, sure = in_one_call(stack, stack.compiled, layers, hidden, samplings, positions, target, judged, penalty)
    elif not exact:
        hits, sure = over_shortlist(stack, picker, layers, hidden, samplings, positions, target, judged, penalty)
    if hits is None or sure is None:
        hits, sure = _over_vocabulary(stack, picker, layers, hidden, samplings, positions, judged, penalty)
    if hits.device.type == "cpu":
        return Shadow(tuple(layers), hits.numpy(), sure.float().numpy())
    told = torch.stack([hits.float(), sure.float()]).cpu().numpy()  # one copy to the host
    return Shadow(tuple(layers), told[0] > 0, told[1])


def in_one_call(
    stack: Stack,
    body: CompiledBody,
    layers: Sequence[int],
    hidden: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    target: Tensor,
    judged: Tensor,
    penalty: Penalty | None = None,
) -> tuple[Tensor, Tensor]:
    """What `over_shortlist` gives, with the same arguments, in one call."""
    heads = stack.exit_heads  # read once: another thread may set it
    if heads is not None:
        hidden = heads.of_layers(hidden, layers)
    num_likely = min(NUM_TOP, target.shape[1]) - 1
    return look(body, hidden, told_of(samplings), positions, target, judged, num_likely, stack.others, penalty)


def over_shortlist(
    stack: Stack,
    picker: Picker,
    layers: Sequence[int],
    hidden: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    target: Tensor,
    judged: Tensor,
    penalty: Penalty | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Hits, bool, and confidences, fp32, `[layers, N]`, or None where the head is of an unknown kind.

    Arguments are those of `shadow_picks`.
    """
    own = judged[:, None]
    likely = target.scatter(1, own, float("-inf")).topk(min(NUM_TOP, target.shape[1]) - 1).indices
    top = torch.cat((own, likely), 1)  # [N, T]; the target's pick comes first
    logits = stack.short_logits(hidden, top, layers)
    if logits is None:
        return None, None
    if penalty is not None:
        logits = penalty.applied(logits, torch.cat((top, stack.others.expand(len(top), -1)), 1))
    twice = (stack.others[:, None] == top[:, None, :]).any(-1)  # [N, others]
    num_top, num_others = top.shape[1], len(stack.others)
    logits[:, :, num_top:].masked_fill_(twice, float("-inf"))
    unseen = (target.shape[1] - num_top) / (num_others - twice.sum(-1)).clamp(
        min=1
    )  # tokens that each other stands for
    weights = torch.ones_like(logits[0])
    weights[:, num_top:] = unseen.clamp(min=1)[:, None]
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for i, sampling in enumerate(samplings):
        groups.setdefault(sampling.filters, []).append(i)
    for members in groups.values():
        if samplings[members[0]].temperature > 0:
            at = torch.tensor(members, device=logits.device)
            tokens = torch.cat((top[at], stack.others.expand(len(members), -1)), 1)
            seeds = torch.tensor([samplings[i].seed for i in members], device=logits.device)
            places = torch.tensor([positions[i] for i in members], device=logits.device)
            noise = gumbel(seeds, places, target.shape[1], tokens)
            kept = filtered(logits[:, at].flatten(0, 1), samplings[members[0]]).view(len(logits), len(members), -1)
            logits[:, at] = kept + noise
            weights[at] = 1  # noise makes a few of many tokens stand out; a sample cannot stand for the rest
    best = logits.amax(-1)
    sure = 1 / ((logits - best[..., None]).exp() * weights).sum(-1)
    return logits[..., 0] >= best, sure


def _over_vocabulary(
    stack: Stack,
    picker: Picker,
    layers: Sequence[int],
    hidden: Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    judged: Tensor,
    penalty: Penalty | None = None,
) -> tuple[Tensor, Tensor]:
    """Hits and confidences `[layers, N]`."""
    count = hidden.shape[1]
    per_call = max(1, CHUNK // count)
    hits, sure = [], []
    for first in range(0, len(layers), per_call):
        some = layers[first : first + per_call]
        logits = stack.early_logits(hidden[first : first + per_call], some)
        logits = logits if penalty is None else penalty.applied(logits)
        picks = picker(logits.flatten(0, 1), [*samplings] * len(some), [*positions] * len(some), with_sure=True)
        assert picks.sure is not None
        hits.append(picks.tokens == judged.repeat(len(some)))
        sure.append(picks.sure)
    return torch.cat(hits).view(-1, count), torch.cat(sure).view(-1, count)


def part_of(shadow: Shadow, start: int, stop: int) -> Shadow:
    """The positions [start, stop) of a shadow over several rows."""
    return Shadow(shadow.layers, shadow.hits[:, start:stop], shadow.confidences[:, start:stop])
