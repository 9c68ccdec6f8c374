"""Picks: the token a row takes at a position, as a deterministic function of (processed logits, seed, position).

Greedy is argmax; sampling is argmax(logits / temperature + Gumbel noise). Plain decoding, drafts and verification all
pick here, with the same processors, filters and noise: a drafted token is accepted iff it is the target's own pick, and
the output is plain decoding's, token for token, at any temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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

from selfspec.errors import got, is_number, whole
from selfspec.kernels.gumbel import NoiseAhead, gumbel
from selfspec.kernels.layout import SamplingTensors
from selfspec.kernels.suite import Pick, pick_for
from selfspec.model.kv_cache import tensor_of

LEAST_TEMPERATURE = 1e-6
MAX_NGRAM = 1 << 16
LIKELIEST = 256  # tokens that top-p looks at first


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row picks: the field's usual names.

    Penalties come first, see `selfspec.executors.penalties`; then the request's logits processors; then temperature,
    top-k, top-p and min-p, in transformers' order.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of likeliest tokens with this probability
    min_p: float = 0.0  # keep tokens at least this likely relative to the likeliest
    seed: int = 0
    repetition_penalty: float = 1.0  # above 0: divides logits of tokens in prompt and output, multiplies negative ones
    presence_penalty: float = 0.0  # -2..2: is subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # -2..2: likewise, once for each time that the output holds the token
    no_repeat_ngram_size: int = 0  # no n tokens stand twice in prompt and output; 0 allows all

    def __post_init__(self) -> None:
        if not (is_number(self.temperature) and math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a number of at least 0 (0 is greedy), {got(self.temperature)}")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, below which logits overflow, "
                f"got {self.temperature}"
            )
        if whole("top_k", self.top_k) < 0:
            raise ValueError(f"top_k must be at least 0 (0 keeps all tokens), got {self.top_k}")
        if not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must lie in (0, 1] (1 keeps all tokens), {got(self.top_p)}")
        if not (is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"min_p must lie in [0, 1] (0 keeps all tokens), {got(self.min_p)}")
        if not -(1 << 63) <= whole("seed", self.seed) < 1 << 63:
            raise ValueError(f"seed must be a 64-bit integer, got {self.seed}")
        if not (is_number(self.repetition_penalty) and 0 < self.repetition_penalty < math.inf):
            raise ValueError(
                f"repetition_penalty must be a number above 0 (1 changes nothing), {got(self.repetition_penalty)}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not (is_number(value) and -2 <= value <= 2):
                raise ValueError(f"{name} must be a number in [-2, 2] (0 changes nothing), {got(value)}")
        if not 0 <= whole("no_repeat_ngram_size", self.no_repeat_ngram_size) <= MAX_NGRAM:
            raise ValueError(
                f"no_repeat_ngram_size must lie in 0..{MAX_NGRAM} (0 allows all), got {self.no_repeat_ngram_size}"
            )

    @property
    def filters(self) -> tuple[float, int, float, float]:
        return (self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def penalties(self) -> tuple[float, float, float, int]:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.no_repeat_ngram_size)

    @property
    def penalizes(self) -> bool:
        """Whether its picks depend on which tokens the row holds."""
        return self.penalties != (1.0, 0.0, 0.0, 0)


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


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """Scores `[N, vocab]` whose softmax is the distribution a row samples from; the logits themselves when greedy."""
    if sampling.temperature == 0:
        return logits
    for warp in _warpers(*sampling.filters):
        logits = warp(None, logits)
    return logits


class Subset(NamedTuple):
    """The tokens that logits are of, where those are not of a whole vocabulary."""

    tokens: Tensor  # int64 [T], ascending: of equal logits the lowest token wins, as it does in the whole vocabulary
    vocab_size: int


def scored(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Tensor,
    noise: NoiseAhead | None = None,
    subset: Subset | None = None,
) -> Tensor:
    """The scores `[N, vocab]` whose argmax is the pick: logits when greedy, else filtered logits plus noise.

    Args:
        logits: fp32 `[N, vocab]`, after penalties and any logits processor.
        samplings: how each of the N positions' rows picks.
        positions: int64 `[N]`, the index in its row's content of the token to be picked.
        noise: where the same noise is kept, if it is.
        subset: the T tokens of logits `[N, T]` over a part of the vocabulary; their noise is the same as in the whole.
    """
    kinds = {s.filters for s in samplings}
    if len(kinds) == 1:
        return _scored_alike(logits, samplings, positions, noise, subset)
    out = torch.empty_like(logits)
    for kind in kinds:
        members = [i for i, s in enumerate(samplings) if s.filters == kind]
        index = tensor_of(members, logits.device)
        some = [samplings[i] for i in members]
        out[index] = _scored_alike(logits[index], some, positions[index], noise, subset)
    return out


def _scored_alike(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Tensor,
    noise: NoiseAhead | None,
    subset: Subset | None,
) -> Tensor:
    if samplings[0].temperature == 0:
        return logits
    seeds, vocab_size = [s.seed for s in samplings], logits.shape[1] if subset is None else subset.vocab_size
    scores = filtered(logits, samplings[0])
    if noise is not None:
        whole = noise(seeds, positions, vocab_size)
        return scores + (whole if subset is None else whole[:, subset.tokens])
    tokens = None if subset is None else subset.tokens.expand(len(logits), -1)
    return scores + gumbel(tensor_of(seeds, logits.device), positions, vocab_size, tokens)


def pick(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Tensor,
    noise: NoiseAhead | None = None,
    subset: Subset | None = None,
) -> Tensor:
    """Pick one token per packed position: int64 `[N]`. See `scored` for the arguments."""
    fused = pick_for(logits.device)
    if fused is not None:
        return _fused_pick(fused, logits, samplings, positions, subset)[0]
    return among(scored(logits, samplings, positions, noise, subset).argmax(-1), subset)


def pick_surely(
    logits: Tensor,
    samplings: Sequence[Sampling],
    positions: Tensor,
    noise: NoiseAhead | None = None,
    subset: Subset | None = None,
) -> tuple[Tensor, Tensor]:
    """Picks `[N]`, and how sure each is, see `surely`."""
    fused = pick_for(logits.device)
    if fused is not None:
        return _fused_pick(fused, logits, samplings, positions, subset)
    picks, sure = surely(scored(logits, samplings, positions, noise, subset))
    return among(picks, subset), sure


def _fused_pick(
    fused: Pick, logits: Tensor, samplings: Sequence[Sampling], positions: Tensor, subset: Subset | None
) -> tuple[Tensor, Tensor]:
    return fused(logits, sampling_tensors(samplings, positions), None, None if subset is None else subset.tokens)


def surely(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Picks `[N]`, and how sure each is: its share in the softmax of the scores it was picked from, fp32 `[N]`.

    Greedy, that is the token's probability. Sampled, it tells by how much the token won with this very noise, which
    the target will have too; its probability would say how common the token is, not how likely they are to agree.
    """
    picks = scores.argmax(-1, keepdim=True)
    return picks[:, 0], scores.softmax(-1).gather(1, picks)[:, 0].float()


def sampling_tensors(samplings: Sequence[Sampling], positions: Tensor) -> SamplingTensors:
    """The same for the kernels, in one upload."""
    numbers = [[s.temperature, s.top_p, s.min_p] for s in samplings]
    floats = torch.tensor(numbers, dtype=torch.float32).view(torch.int32)
    ints = torch.tensor([[s.seed, s.top_k] for s in samplings])
    told = torch.cat([ints, floats.long()], 1).t().contiguous()
    told = told.pin_memory().to(positions.device, non_blocking=True) if positions.is_cuda else told
    temperature, top_p, min_p = told[2:].int().view(torch.float32)
    sampled = [s for s in samplings if s.temperature > 0]
    filtered = any(s.top_k or s.top_p < 1 or s.min_p for s in sampled)
    return SamplingTensors(temperature, told[1].int(), top_p, min_p, told[0], positions, bool(sampled), filtered)


def second_choices(scores: Tensor, picks: Tensor) -> Tensor:
    """What would have been picked instead, int64 `[N]`, from the scores `[N, vocab]` that gave `picks`."""
    return scores.scatter(1, picks[:, None], float("-inf")).argmax(-1)


def among(picks: Tensor, subset: Subset | None) -> Tensor:
    """The tokens that picks from scores of a subset stand for, int64 `[N]`."""
    return picks if subset is None else subset.tokens[picks]
