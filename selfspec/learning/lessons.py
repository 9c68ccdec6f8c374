"""`Lessons`: the last positions of one layer where a draft was refused, with what the target said there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SETTLED_AT_ONCE = 64  # positions whose likeliest tokens are looked up in one call: one at a time costs ten times more


class Batch(NamedTuple):
    """Some lessons."""

    hidden: Tensor  # [n, hidden_size], after the layer, before the final norm
    tokens: Tensor  # int64 [n, k]: the target's likeliest tokens
    log_p: Tensor  # [n, k] in fp32: their log probabilities under the target; the rest of the vocabulary is one bucket


class Lessons:
    """A ring of positions: the oldest make room for new ones.

    Args:
        capacity: positions kept.
        top_k: likeliest tokens kept of each; at most one less than the vocabulary.
    """

    def __init__(self, capacity: int, top_k: int) -> None:
        self._capacity, self._top_k = capacity, top_k
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._num_waiting = 0
        self._ring: Batch | None = None
        self._num_settled = 0  # ever

    def __len__(self) -> int:
        return min(self._capacity, self._num_settled + self._num_waiting)

    def add(self, hidden: Tensor, logits: Tensor) -> None:
        """Take hidden states `[n, hidden_size]` and the target's logits `[n, vocab]`, which nobody may write to."""
        self._waiting.append((hidden, logits))
        self._num_waiting += len(hidden)
        if self._num_waiting >= SETTLED_AT_ONCE:
            self._settle()

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """`count` of them by chance, each perhaps more than once; there must be one at least."""
        self._settle()
        assert self._ring is not None
        at = torch.randint(len(self), (count,), generator=generator).to(self._ring.hidden.device)
        return Batch(*(part[at] for part in self._ring))

    def _settle(self) -> None:
        """Move what waits into the ring."""
        if not self._waiting:
            return
        hidden, logits = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._num_waiting = [], 0
        hidden, logits = hidden[-self._capacity :], logits[-self._capacity :]
        values, tokens = logits.topk(min(self._top_k, logits.shape[1] - 1))
        new = Batch(hidden, tokens, values - logits.logsumexp(1, keepdim=True))
        if self._ring is None:
            with torch.inference_mode(False):  # it is written to inside of inference mode and outside
                self._ring = Batch(*(part.new_empty(self._capacity, part.shape[1]) for part in new))
        at = (torch.arange(len(hidden), device=hidden.device) + self._num_settled) % self._capacity
        for ring, part in zip(self._ring, new, strict=True):
            ring[at] = part
        self._num_settled += len(hidden)
