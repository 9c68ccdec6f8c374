"""Penalties on tokens that a row holds already; `kernels/cpu/penalties.h` says the same in C++.

At every position they depend on that position's own prefix: the row's content and the drafted tokens on the way there.
In this order: the repetition penalty (`logit * p` below 0, else `logit / p`) on tokens of prompt and output; -inf for
tokens that would repeat an n-gram of prompt and output; then `frequency * count + presence * (count > 0)` is taken off,
where output tokens alone count. The first two are transformers', the last two are vLLM's and OpenAI's.
"""

from __future__ import annotations

from collections import abc
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from selfspec.core import Sequence
from selfspec.params import SamplingParams


class Penalty(NamedTuple):
    """What penalties do to logits at N positions; nothing at positions of rows without any."""

    repetition: Tensor  # fp32 [N, 1]
    seen: Tensor  # bool [N, vocab]: tokens that stand before
    bias: Tensor  # fp32 [N, vocab], to be added

    def applied(self, logits: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Logits after penalties, a new tensor.

        Args:
            logits: fp32 `[..., N, T]`.
            tokens: int64 `[T]` or `[N, T]`, those that logits are of; None: all of the vocabulary.
        """
        seen, bias = (one[:, : logits.shape[-1]] for one in (self.seen, self.bias))
        if tokens is not None:
            index = tokens.expand(len(seen), -1)
            seen, bias = self.seen.gather(1, index), self.bias.gather(1, index)
        repeated = torch.where(logits < 0, logits * self.repetition, logits / self.repetition)
        return torch.where(seen, repeated, logits) + bias


class Text(NamedTuple):
    """What a row holds, and how it picks."""

    params: SamplingParams
    token_ids: abc.Sequence[int]
    num_prompt_tokens: int


class Penalties:
    """The penalties of a round's rows. On a device, the host waits for nothing.

    Args:
        texts: what the R rows hold when the round begins.
    """

    def __init__(self, texts: abc.Sequence[Text], vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._sizes = [text.params.penalties[3] for text in texts]
        contents = [text.token_ids if text.params.penalizes else () for text in texts]
        longest = max(map(len, contents)) + max(self._sizes)
        pad = vocab_size  # a column of its own, which tokens that the head does not have share
        padded = np.full((len(texts), longest), pad)
        for line, own in zip(padded, contents, strict=True):
            line[longest - len(own) :] = own
        self._token_ids = self.sent(padded).clamp(max=pad)  # [R, longest], each line ends with its row's last token
        outputs = [len(own) - text.num_prompt_tokens for own, text in zip(contents, texts, strict=True)]
        is_output = torch.arange(longest, device=device) >= longest - self.sent(outputs)[:, None]
        zeros = torch.zeros(len(texts), vocab_size + 1, dtype=torch.float32, device=device)
        self._seen = zeros.bool().scatter_(1, self._token_ids, True)
        self._counts = zeros.scatter_add_(1, self._token_ids, is_output.float())
        numbers = self.sent([text.params.penalties[:3] for text in texts], np.float32)
        self._repetition, self._presence, self._frequency = numbers.t()[:, :, None]

    @classmethod
    def of(cls, rows: list[Sequence], vocab_size: int, device: torch.device | str) -> Penalties | None:
        """Those of rows as they are; None where no row has any."""
        if not any(row.request.params.penalizes for row in rows):
            return None
        return cls([Text(row.request.params, row.token_ids, row.num_prompt_tokens) for row in rows], vocab_size, device)

    def sent(self, numbers: Any, dtype: type[Any] = np.int64) -> Tensor:
        """Numbers of the host on the device, without waiting for it."""
        made = torch.from_numpy(np.array(numbers, dtype))
        pinned = made.pin_memory() if torch.device(self._device).type == "cuda" else made
        return pinned.to(self._device, non_blocking=True)

    def at(self, owners: abc.Sequence[int], before: Tensor, depths: abc.Sequence[int]) -> Penalty:
        """What they do at N positions.

        Args:
            owners: `[N]`, the index of each position's row.
            before: int64 `[N, D]`, the tokens drafted before each position, the first ones of each line.
            depths: `[N]`, how many of them count.
        """
        index, depth = self.sent(owners), self.sent(depths)[:, None]
        pad = self._vocab_size
        is_drafted = torch.arange(before.shape[1], device=self._device) < depth
        drafted = before.clamp(max=pad).masked_fill(~is_drafted, pad)
        seen = self._seen[index].scatter_(1, drafted, True)
        counts = self._counts[index].scatter_add_(1, drafted, torch.ones_like(drafted, dtype=torch.float32))
        bias = -(self._frequency[index] * counts + self._presence[index] * (counts > 0))
        for size in {self._sizes[i] for i in owners} - {0}:
            some = self.sent([n for n, i in enumerate(owners) if self._sizes[i] == size])
            text = torch.cat([self._token_ids[index[some]], drafted[some]], 1)
            end = self._token_ids.shape[1] + depth[some]
            bias[some] = bias[some].masked_fill(self._repeating(text, end, size), float("-inf"))
        return Penalty(self._repetition[index], seen[:, :pad], bias[:, :pad])

    def _repeating(self, text: Tensor, end: Tensor, size: int) -> Tensor:
        """Tokens that would end an n-gram that there is already, bool `[n, vocab + 1]`, in texts up to `end` `[n, 1]`.

        Windows that reach into what texts are filled up with have it for a last token, or begin like no text ends.
        """
        last = text.gather(1, end + torch.arange(1 - size, 0, device=text.device))  # the n-gram's first n - 1 tokens
        windows = text.unfold(1, size, 1)
        found = (windows[..., :-1] == last[:, None]).all(-1)
        pad = self._vocab_size
        banned = torch.zeros(len(text), pad + 1, dtype=torch.bool, device=text.device)
        return banned.scatter_(1, windows[..., -1].masked_fill(~found, pad), True)

    def along(self, blocks: abc.Sequence[abc.Sequence[int]]) -> Penalty:
        """What they do at the positions of each row's next tokens, row after row: before each stand those before it."""
        owners = [i for i, block in enumerate(blocks) for _ in block]
        depths = [n for block in blocks for n in range(len(block))]
        longest = max(map(len, blocks), default=0)
        lines = [token for block in blocks for _ in block for token in (*block, *[0] * (longest - len(block)))]
        return self.at(owners, self.sent(lines).view(len(owners), longest), depths)


class DraftPenalties:
    """Penalties while rows draft a token each, step by step; rows that leave do not come back."""

    def __init__(self, penalties: Penalties) -> None:
        self._penalties, self._members = penalties, list[int]()
        self._drafted: Tensor | None = None  # int64 [members, steps]

    def at(self, members: list[int]) -> Penalty:
        """What they do at the next token of these rows."""
        if self._drafted is None:
            self._drafted = self._penalties.sent([[]] * len(members))
        elif members != self._members:
            self._drafted = self._drafted[self._penalties.sent([self._members.index(i) for i in members])]
        self._members = members
        return self._penalties.at(members, self._drafted, [self._drafted.shape[1]] * len(members))

    def add(self, picks: Tensor) -> None:
        """Take the token that each of these rows drafted, int64 `[members]`."""
        assert self._drafted is not None
        self._drafted = torch.cat([self._drafted, picks[:, None]], 1)


def paths_to(lengths: abc.Sequence[int]) -> list[list[int]]:
    """Of every packed token, row after row, the packed drafted tokens on the way to it, with its own.

    Args:
        lengths: drafted tokens per row; its last token comes before them.
    """
    firsts = accumulate((drafted + 1 for drafted in lengths), initial=1)
    return [[*range(first, first + i)] for first, n in zip(firsts, lengths, strict=False) for i in range(n + 1)]
