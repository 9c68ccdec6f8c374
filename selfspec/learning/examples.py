"""`ExampleBuffer`: a buffer of one layer's training examples, which are positions of rejected drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TOPK_BATCH = 64  # positions per call of top-k; single calls take ten times as long


class Batch(NamedTuple):
    """Training examples."""

    hidden: Tensor  # [n, hidden_size], after the layer, before the final norm
    tokens: Tensor  # int64 [n, k]: the target's most probable tokens
    log_p: Tensor  # [n, k] in fp32: their log probabilities under the target


class ExampleBuffer:
    """A ring buffer of positions.

    Args:
        capacity: maximum number of positions.
        top_k: number of most probable tokens to keep per position, at most the vocabulary size - 1.
    """

    def __init__(self, capacity: int, top_k: int) -> None:
        self._capacity, self._top_k = capacity, top_k
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._num_waiting = 0
        self._ring: Batch | None = None
        self._num_stored = 0  # including overwritten ones

    def __len__(self) -> int:
        return min(self._capacity, self._num_stored + self._num_waiting)

    def add(self, hidden: Tensor, logits: Tensor) -> None:
        """Add hidden states `[n, hidden_size]` and the target's logits `[n, vocab]`; neither may be modified later."""
        self._waiting.append((hidden, logits))
        self._num_waiting += len(hidden)
        if self._num_waiting >= TOPK_BATCH:
            self._store_waiting()

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        """Draw `count` positions with replacement; the buffer must not be empty."""
        self._store_waiting()
        assert self._ring is not None
        at = torch.randint(len(self), (count,), generator=generator).to(self._ring.hidden.device)
        return Batch(*(part[at] for part in self._ring))

    def _store_waiting(self) -> None:
        """Move the waiting positions into the ring buffer."""
        if not self._waiting:
            return
        hidden, logits = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._num_waiting = [], 0
        hidden, logits = hidden[-self._capacity :], logits[-self._capacity :]
        values, tokens = logits.topk(min(self._top_k, logits.shape[1] - 1))
        new = Batch(hidden, tokens, values - logits.logsumexp(1, keepdim=True))
        if self._ring is None:
            with torch.inference_mode(False):  # the buffer is modified inside and outside of inference mode
                self._ring = Batch(*(part.new_empty(self._capacity, part.shape[1]) for part in new))
        at = (torch.arange(len(hidden), device=hidden.device) + self._num_stored) % self._capacity
        for ring, part in zip(self._ring, new, strict=True):
            ring[at] = part
        self._num_stored += len(hidden)
