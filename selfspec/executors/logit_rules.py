"""`logit_bias` and `min_tokens` as logits processors, which compiled programs know as biases."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.core import Request


class Bias(NamedTuple):
    """What is added to a token's logit at positions before `until`."""

    token: int
    added: float
    until: int = 2**62


class LogitBias:
    """Adds numbers to the logits of some tokens.

    Args:
        bias: by token id.
    """

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.biases = [Bias(token, float(added)) for token, added in bias.items()]
        self._tokens, self._bias = torch.tensor([*bias]), torch.tensor([*bias.values()])

    def __call__(self, token_ids: Tensor, logits: Tensor) -> Tensor:
        if self._tokens.device != logits.device:
            self._tokens, self._bias = self._tokens.to(logits.device), self._bias.to(logits.device)
        return logits.index_add(1, self._tokens, self._bias.to(logits.dtype)[None])


class MinTokens:
    """Rules out some tokens until a row has a length.

    Args:
        ends: their ids.
        length: tokens of prompt and output.
    """

    def __init__(self, ends: Collection[int], length: int) -> None:
        self._ends, self._length = sorted(ends), length
        self.biases = [Bias(token, -torch.inf, length) for token in self._ends]

    def __call__(self, token_ids: Tensor, logits: Tensor) -> Tensor:
        if token_ids.shape[1] >= self._length:
            return logits
        logits = logits.clone()
        logits[:, self._ends] = -torch.inf
        return logits


def are_rules(processors: Iterable[Any]) -> bool:
    """Whether all of these processors are of this module."""
    return all(isinstance(one, LogitBias | MinTokens) for one in processors)


def biases_of(processors: Iterable[Any]) -> list[Bias]:
    """What processors of this module add; of entries of the same token that hold at a position, the last one counts."""
    return [bias for one in processors if isinstance(one, LogitBias | MinTokens) for bias in one.biases]


def with_logit_rules(request: Request) -> Request:
    """The request, whose `logit_bias` and `min_tokens` are processors after its own."""
    params, rules = request.params, list[LogitBias | MinTokens]()
    if params.logit_bias:
        rules.append(LogitBias(params.logit_bias))
    ends = {*(() if params.ignore_eos else request.eos_token_ids), *(params.stop_token_ids or ())}
    if params.min_tokens and ends:
        rules.append(MinTokens(ends, len(request.prompt_token_ids) + params.min_tokens))
    if not rules:
        return request
    return replace(request, params=replace(params, logits_processors=(*params.processors, *rules)))
