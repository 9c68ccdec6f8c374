"""Inputs of compiled rounds for penalties and biases, and their outputs for log-probabilities."""

from __future__ import annotations

from array import array
from collections import abc
from itertools import accumulate
from typing import Any

import numpy as np

from selfspec.core import Sequence
from selfspec.executors.logit_rules import Bias, biases_of
from selfspec.executors.logprobs import TokenLogprobs


class PickData:
    """The contents of the rows with penalties or a bias, and the number of log-probabilities per row.

    The compiled call reads its memory, so the caller keeps it until the call returns.

    Args:
        contents: per row, its tokens; empty for rows without penalties and bias.
        num_prompts: per row, how many of these belong to the prompt.
        num_likely: per row, the number of most probable tokens to report at each position; -1: no log-probabilities.
        biases: per row, what is added to its logits.
    """

    def __init__(
        self,
        contents: abc.Sequence[abc.Sequence[int]],
        num_prompts: abc.Sequence[int],
        num_likely: abc.Sequence[int],
        biases: abc.Sequence[abc.Sequence[Bias]] = (),
    ) -> None:
        self._is_penalized, self._num_likely = any(contents), list(num_likely)
        ends = [0, *accumulate(map(len, contents))]
        tokens = [token for own in contents for token in own]
        entries = [one for own in biases for one in own]
        bias_ends = [0, *accumulate(map(len, biases or [()] * len(contents)))]
        whole = tokens, ends, num_prompts, bias_ends, [one.token for one in entries], [one.until for one in entries]
        self._arrays: list[array[Any]] = [array("q", numbers) for numbers in whole]
        self._arrays.append(array("f", [one.added for one in entries]))

    @classmethod
    def of(cls, rows: list[Sequence], vocab_size: int) -> PickData | None:
        """The data of these rows; None if no row has penalties or a bias, or requests log-probabilities."""
        requests = [row.request for row in rows]
        biases = [biases_of(request.params.processors) for request in requests]
        penalized = [bool(own) or one.params.penalizes for own, one in zip(biases, requests, strict=True)]
        if not any(penalized) and all(request.params.logprobs is None for request in requests):
            return None
        contents = [row.token_ids if own else [] for row, own in zip(rows, penalized, strict=True)]
        num_prompts = [row.num_prompt_tokens if own else 0 for row, own in zip(rows, penalized, strict=True)]
        num_likely = [-1 if one.params.logprobs is None else min(one.params.logprobs, vocab_size) for one in requests]
        return cls(contents, num_prompts, num_likely, biases)

    def texts(self) -> tuple[int | None, ...]:
        """Addresses of tokens, row offsets and prompt lengths, and of a `Bias` of `penalties.h`: row offsets, tokens
        and positions, int64 each, and fp32 numbers; None if no row has penalties or a bias."""
        return tuple([array.buffer_info()[0] if self._is_penalized else None for array in self._arrays])

    def logprobs(self, max_draft: int, num_rounds: int) -> LogprobBuffers | None:
        """Buffers for `num_rounds` rounds of up to `max_draft` drafted tokens per row; None if none are requested."""
        return LogprobBuffers(self._num_likely, max_draft, num_rounds) if max(self._num_likely) >= 0 else None


class LogprobBuffers:
    """Log-probabilities of emitted tokens, fp32, with the most probable tokens at their positions."""

    def __init__(self, num_likely: abc.Sequence[int], max_draft: int, num_rounds: int) -> None:
        self._num_likely = np.array(num_likely, np.int64)
        shape = num_rounds * len(num_likely), max_draft + 1
        self._own, self._ranks = np.empty(shape, np.float32), np.empty(shape, np.int64)
        wider = *shape, max(1, *num_likely)
        self._likely, self._likely_own = np.empty(wider, np.int64), np.empty(wider, np.float32)

    def set_outputs(self, verify: Any) -> None:
        """Let a `VerifyArgs` structure point to these buffers."""
        verify.num_likely, verify.most_likely = self._num_likely.ctypes.data, self._likely.shape[-1]
        verify.logprobs, verify.ranks = self._own.ctypes.data, self._ranks.ctypes.data
        verify.likely, verify.likely_logprobs = self._likely.ctypes.data, self._likely_own.ctypes.data

    def read(self, at: int, token_ids: abc.Sequence[int]) -> list[TokenLogprobs] | None:
        """The log-probabilities of a row's emitted tokens in a round; None if the row requests none.

        Args:
            at: round * number of rows + row.
            token_ids: the tokens that the row emitted in the round.
        """
        wanted, count = int(self._num_likely[at % len(self._num_likely)]), len(token_ids)
        if wanted < 0:
            return None
        own, ranks = self._own[at, :count].tolist(), self._ranks[at, :count].tolist()
        tokens, others = (one[at, :count, :wanted].tolist() for one in (self._likely, self._likely_own))
        top = [list(zip(*pair, strict=True)) for pair in zip(tokens, others, strict=True)]
        return [TokenLogprobs(*one) for one in zip(token_ids, own, ranks, top, strict=True)]
