"""Log-probabilities of emitted tokens, from the target's logits before penalties, processors, temperature and filters.

`kernels/cpu/logprobs.h` says the same in C++.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """What the target said of an emitted token."""

    token: int
    logprob: float
    rank: int  # 1: it is the likeliest; of equal logits the lowest token comes first
    top: list[tuple[int, float]]  # the likeliest tokens, as many as were asked for, with their log-probabilities


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_likely: int) -> list[TokenLogprobs]:
    """Of n tokens, given the target's logits fp32 `[n, vocab]` at their positions."""
    vocab = logits.shape[1]
    own = torch.tensor(tokens, device=logits.device)[:, None]
    logprobs, value = logits.log_softmax(-1), logits.gather(1, own)
    is_before = torch.arange(vocab, device=logits.device) < own
    ranks = 1 + ((logits > value) | ((logits == value) & is_before)).sum(-1)
    columns = torch.stack([logprobs.gather(1, own)[:, 0].double(), ranks.double()]).tolist()
    top = _likeliest(logits, logprobs, min(num_likely, vocab))
    each = zip(tokens, *columns, top, strict=True)
    return [TokenLogprobs(token, logprob, int(rank), likely) for token, logprob, rank, likely in each]


def _likeliest(logits: Tensor, logprobs: Tensor, wanted: int) -> list[list[tuple[int, float]]]:
    """Of each position the likeliest tokens; `topk` would leave open which of equal ones."""
    found: list[list[tuple[float, int, float]]] = [[] for _ in logits]
    if wanted:
        least = logits.topk(wanted).values[:, -1:]
        rows, tokens = (logits >= least).nonzero(as_tuple=True)
        found_rows = torch.stack([one.double() for one in (rows, tokens, logits[rows, tokens], logprobs[rows, tokens])])
        for row, token, logit, logprob in found_rows.t().tolist():
            found[int(row)].append((-logit, int(token), logprob))
    return [[(token, logprob) for _, token, logprob in sorted(own)[:wanted]] for own in found]
