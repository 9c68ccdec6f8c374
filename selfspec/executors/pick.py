"""Picks: the token a row takes at a position, as a deterministic function of (processed logits, seed, position).

Greedy is argmax; sampling is argmax(logits / temperature + Gumbel noise). Plain decoding, drafts and verification all
pick here, with the same processors, filters and noise: a drafted token is accepted iff it is the target's own pick, and
the output is plain decoding's, token for token, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.core import SamplingParams
from selfspec.kernels.gumbel import NoiseAhead, gumbel
from selfspec.kernels.layout import SamplingTensors
from selfspec.kernels.suite import Pick, pick_for
from selfspec.model.kv_cache import tensor_of

LIKELIEST = 256  # tokens that top-p looks at first


class _TopP:
    """transformers' top-p filter, which sorts the vocabulary, for rows whose likeliest tokens do not settle it.

    Where they do, sums go from the likeliest token on, and theirs from the least likely: rounding may move the bound by
    a token. A row's bound depends on that row alone.
    """

    def __init__(self, top_p: float) -> None:
        self._top_p, self._whole = top_p, TopPLogitsWarper(top_p)

    def __call__(self, input_ids: None, logits: Tensor) -> Tensor:
        if logits.shape[1] <= LIKELIEST or logits.device.type != "cpu":  # elsewhere asking would cost a wait
            return self._whole(input_ids, logits)
        top, tokens = logits.softmax(-1).topk(LIKELIEST)
        mass = top.cumsum(-1)
        count = (mass - top < self._top_p).sum(-1, keepdim=True).clamp_(min=1)  # none where a logit is no number
        kept = logits >= logits.gather(1, tokens.gather(1, count - 1))
        # Of tokens as likely as the last one kept, the whole sort keeps some: it settles that row.
        settled = (mass[:, -1] >= self._top_p) & (kept.sum(-1) == count[:, 0])
        out = logits.masked_fill(~kept, float("-inf"))
        if not bool(settled.all()):
            rest = (~settled).nonzero()[:, 0]
            out[rest] = self._whole(input_ids, logits[rest])
        return out


@lru_cache(maxsize=64)
def _warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Any, ...]:
    made: list[Any] = []
    if temperature != 1:
        made.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        made.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        made.append(_TopP(top_p))
    if min_p:
        made.append(MinPLogitsWarper(min_p))
    return tuple(made)


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Scores `[N, vocab]` whose softmax is the distribution a row samples from; the logits themselves when greedy."""
    if params.is_greedy:
        return logits
    for warp in _warpers(*params.filters):
        logits = warp(None, logits)
    return logits


class Subset(NamedTuple):
    """The tokens that logits are of, where those are not of a whole vocabulary."""

    tokens: Tensor  # int64 [T], ascending: of equal logits the lowest token wins, as it does in the whole vocabulary
    vocab_size: int


def scored(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Tensor,
    noise: NoiseAhead | None = None,
    subset: Subset | None = None,
) -> Tensor:
    """The scores `[N, vocab]` whose argmax is the pick: logits when greedy, else filtered logits plus noise.

    Args:
        logits: fp32 `[N, vocab]`, after penalties and any logits processor.
        params: how each of the N positions' rows picks.
        positions: int64 `[N]`, the index in its row's content of the token to be picked.
        noise: where the same noise is kept, if it is.
        subset: the T tokens of logits `[N, T]` over a part of the vocabulary; their noise is the same as in the whole.
    """
    kinds = {one.filters for one in params}
    if len(kinds) == 1:
        return _scored_alike(logits, params, positions, noise, subset)
    out = torch.empty_like(logits)
    for kind in kinds:
        members = [i for i, one in enumerate(params) if one.filters == kind]
        index = tensor_of(members, logits.device)
        some = [params[i] for i in members]
        out[index] = _scored_alike(logits[index], some, positions[index], noise, subset)
    return out


def _scored_alike(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Tensor,
    noise: NoiseAhead | None,
    subset: Subset | None,
) -> Tensor:
    if params[0].is_greedy:
        return logits
    seeds, vocab_size = [one.seed for one in params], logits.shape[1] if subset is None else subset.vocab_size
    scores = filtered(logits, params[0])
    if noise is not None:
        whole = noise(seeds, positions, vocab_size)
        return scores + (whole if subset is None else whole[:, subset.tokens])
    tokens = None if subset is None else subset.tokens.expand(len(logits), -1)
    return scores + gumbel(tensor_of(seeds, logits.device), positions, vocab_size, tokens)


def pick(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Tensor,
    noise: NoiseAhead | None = None,
    subset: Subset | None = None,
) -> Tensor:
    """Pick one token per packed position: int64 `[N]`. See `scored` for the arguments."""
    fused = pick_for(logits.device)
    if fused is not None:
        return _fused_pick(fused, logits, params, positions, subset)[0]
    return to_token_ids(scored(logits, params, positions, noise, subset).argmax(-1), subset)


def pick_with_confidence(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Tensor,
    noise: NoiseAhead | None = None,
    subset: Subset | None = None,
) -> tuple[Tensor, Tensor]:
    """Picks `[N]` and their confidences, see `confidences_of`."""
    fused = pick_for(logits.device)
    if fused is not None:
        return _fused_pick(fused, logits, params, positions, subset)
    picks, confidences = confidences_of(scored(logits, params, positions, noise, subset))
    return to_token_ids(picks, subset), confidences


def _fused_pick(
    fused: Pick, logits: Tensor, params: Sequence[SamplingParams], positions: Tensor, subset: Subset | None
) -> tuple[Tensor, Tensor]:
    return fused(logits, sampling_tensors(params, positions), None, None if subset is None else subset.tokens)


def confidences_of(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Picks `[N]`, and the confidence of each: its share in the softmax of the scores it was picked from, fp32 `[N]`.

    Greedy, that is the token's probability. Sampled, it tells by how much the token won with this very noise, which
    the target will have too; its probability would say how common the token is, not how likely they are to agree.
    """
    picks = scores.argmax(-1, keepdim=True)
    return picks[:, 0], scores.softmax(-1).gather(1, picks)[:, 0].float()


def sampling_tensors(params: Sequence[SamplingParams], positions: Tensor) -> SamplingTensors:
    """The same for the kernels, in one upload."""
    filters = [one.filters for one in params]
    numbers = [[temperature, top_p, min_p] for temperature, _, top_p, min_p in filters]
    floats = torch.tensor(numbers, dtype=torch.float32).view(torch.int32)
    ints = torch.tensor([[one.seed, one.filters[1]] for one in params])
    packed = torch.cat([ints, floats.long()], 1).t().contiguous()
    packed = packed.pin_memory().to(positions.device, non_blocking=True) if positions.is_cuda else packed
    temperature, top_p, min_p = packed[2:].int().view(torch.float32)
    sampled = [one for one in filters if one[0] > 0]
    is_filtered = any(top_k or top_p < 1 or min_p for _, top_k, top_p, min_p in sampled)
    return SamplingTensors(temperature, packed[1].int(), top_p, min_p, packed[0], positions, bool(sampled), is_filtered)


def to_token_ids(picks: Tensor, subset: Subset | None) -> Tensor:
    """The tokens that picks from scores of a subset stand for, int64 `[N]`."""
    return picks if subset is None else subset.tokens[picks]
