"""The pick: the token that a row takes at a position, as a deterministic function of (logits, seed, position).

Greedy is argmax. Sampling is argmax(filtered logits + Gumbel noise). Plain decoding, drafts and verification pick here,
and a drafted token is accepted iff it equals the target's pick: so the output is plain decoding's, token for token, at
any temperature. `cpu/pick.h` and `fused_pick.py` do the same in C++ and Triton.
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

from selfspec.kernels.gumbel import NoiseAhead, gumbel
from selfspec.kernels.layout import SamplingTensors
from selfspec.params import SamplingParams

LIKELIEST = 256  # tokens that top-p looks at first


class Subset(NamedTuple):
    """The tokens that logits are of, where those are not of a whole vocabulary."""

    tokens: Tensor  # int64 [T], ascending: of equal logits the lowest token wins, as it does in the whole vocabulary
    vocab_size: int


class _TopP:
    """transformers' top-p filter, which sorts the vocabulary only for rows that their likeliest tokens do not decide.

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
        # Of tokens as likely as the last one kept, the whole sort keeps some: it decides that row.
        is_decided = (mass[:, -1] >= self._top_p) & (kept.sum(-1) == count[:, 0])
        out = logits.masked_fill(~kept, float("-inf"))
        if not bool(is_decided.all()):
            rest = (~is_decided).nonzero()[:, 0]
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
        noise: a cache of the noise.
        subset: the T tokens of logits `[N, T]` over a part of the vocabulary; their noise is the same as in the whole.
    """
    kinds = {one.filters for one in params}
    if len(kinds) == 1:
        return _scored_alike(logits, params, positions, noise, subset)
    out = torch.empty_like(logits)
    for kind in kinds:
        members = [i for i, one in enumerate(params) if one.filters == kind]
        index = _sent(members, logits.device)
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
    seeds, vocab_size = [s.seed for s in params], logits.shape[1] if subset is None else subset.vocab_size
    scores = filtered(logits, params[0])
    if noise is not None:
        whole = noise(seeds, positions, vocab_size)
        return scores + (whole if subset is None else whole[:, subset.tokens])
    tokens = None if subset is None else subset.tokens.expand(len(logits), -1)
    return scores + gumbel(_sent(seeds, logits.device), positions, vocab_size, tokens)


def best_of(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Picks `[N]`, and confidences: the pick's share in the softmax of the scores `[N, vocab]`, fp32 `[N]`.

    Greedy, the confidence is the token's probability. Sampled, it says by how much the token won with this noise, which
    the target will have, too; its probability would say how common the token is, not how likely they are to agree.
    """
    picks = scores.argmax(-1, keepdim=True)
    return picks[:, 0], scores.softmax(-1).gather(1, picks)[:, 0].float()


def to_token_ids(picks: Tensor, subset: Subset | None) -> Tensor:
    """The token ids of picks from scores of a subset, int64 `[N]`."""
    return picks if subset is None else subset.tokens[picks]


def sampling_tensors(params: Sequence[SamplingParams], positions: Tensor) -> SamplingTensors:
    """The same as tensors on the device of `positions`, in one upload."""
    numbers = [[s.filters[0], *s.filters[2:]] for s in params]
    floats = torch.tensor(numbers, dtype=torch.float32).view(torch.int32)
    ints = torch.tensor([[s.seed, s.filters[1]] for s in params])
    columns = torch.cat([ints, floats.long()], 1).t().contiguous()
    columns = columns.pin_memory().to(positions.device, non_blocking=True) if positions.is_cuda else columns
    temperature, top_p, min_p = columns[2:].int().view(torch.float32)
    hot = [s.filters for s in params if s.filters[0] > 0]
    are_filtered = any(top_k or p < 1 or least for _, top_k, p, least in hot)
    return SamplingTensors(temperature, columns[1].int(), top_p, min_p, columns[0], positions, bool(hot), are_filtered)


def params_of(tensors: SamplingTensors) -> list[SamplingParams]:
    """The inverse of `sampling_tensors`, on the host. Filters of greedy places and of empty slots are left out."""
    lines = zip(*(one.tolist() for one in tensors[:5]), strict=True)
    return [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        if temperature > 0
        else SamplingParams(seed=seed)
        for temperature, top_k, top_p, min_p, seed in lines
    ]


def num_accepted(drafted: Sequence[int], picks: Sequence[int]) -> int:
    """The acceptance rule: how many drafted tokens are kept, which is up to the first that is not the target's pick.

    Draft and target pick with the same noise, so this holds at every temperature, and the output is plain decoding's.
    `cpu/round.cpp` and `fused_accept.py` have the same rule in C++ and Triton.

    Args:
        drafted: n tokens.
        picks: the target's, at the n drafted positions and after the last.
    """
    return next((i for i, (token, pick) in enumerate(zip(drafted, picks, strict=False)) if token != pick), len(drafted))


def _sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int64 on the device, without waiting for it."""
    made = torch.tensor(numbers)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)
