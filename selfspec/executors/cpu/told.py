"""What compiled rounds are told of rows with penalties, and of those that ask for log-probabilities."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from selfspec.executors.logprobs import TokenLogprobs
from selfspec.executors.rows import Row


class Told:
    """Of the rows of a call; it is to be kept as long as the call takes.

    Args:
        contents: every row's tokens; empty for rows without penalties.
        num_prompts: how many of these are the prompt.
        num_likely: likeliest tokens that each row's log-probabilities are told of; -1: it asks for none.
    """

    def __init__(
        self, contents: Sequence[Sequence[int]], num_prompts: Sequence[int], num_likely: Sequence[int]
    ) -> None:
        self._is_penalized, self._num_likely = any(contents), list(num_likely)
        ends = [0, *accumulate(map(len, contents))]
        self._arrays = [array("q", numbers) for numbers in ([*_flat(contents)], ends, num_prompts)]

    @classmethod
    def of(cls, rows: Sequence[Row], vocab_size: int) -> Told | None:
        """None where no row has penalties or asks for log-probabilities."""
        requests = [row.request for row in rows]
        penalized = [request.sampling.penalizes for request in requests]
        if not any(penalized) and all(request.logprobs is None for request in requests):
            return None
        contents = [row.content if own else [] for row, own in zip(rows, penalized, strict=True)]
        num_prompts = [row.num_prompt_tokens if own else 0 for row, own in zip(rows, penalized, strict=True)]
        num_likely = [-1 if one.logprobs is None else min(one.logprobs, vocab_size) for one in requests]
        return cls(contents, num_prompts, num_likely)

    def texts(self) -> tuple[int | None, ...]:
        """Where tokens lie, where each row's begin, and how many are its prompt; None where there are no penalties."""
        return tuple([one.buffer_info()[0] if self._is_penalized else None for one in self._arrays])

    def logprobs(self, most: int, num_rounds: int) -> Logprobs | None:
        """Room for those of so many rounds that accept at most `most` drafted tokens; None where none are asked for."""
        return Logprobs(self._num_likely, most, num_rounds) if max(self._num_likely) >= 0 else None


def _flat(contents: Sequence[Sequence[int]]) -> list[int]:
    return [token for own in contents for token in own]


class Logprobs:
    """Log-probabilities of what rounds emit."""

    def __init__(self, num_likely: Sequence[int], most: int, num_rounds: int) -> None:
        self._asked = np.array(num_likely, np.int64)
        shape = num_rounds * len(num_likely), most + 1
        self._own, self._ranks = np.empty(shape, np.float32), np.empty(shape, np.int64)
        wider = *shape, max(1, *num_likely)
        self._likely, self._likely_own = np.empty(wider, np.int64), np.empty(wider, np.float32)

    def show(self, judging: Any) -> None:
        """Tell compiled code where they belong."""
        judging.num_likely, judging.most_likely = self._asked.ctypes.data, self._likely.shape[-1]
        judging.logprobs, judging.ranks = self._own.ctypes.data, self._ranks.ctypes.data
        judging.likely, judging.likely_logprobs = self._likely.ctypes.data, self._likely_own.ctypes.data

    def read(self, at: int, block: Sequence[int]) -> list[TokenLogprobs] | None:
        """Those of the tokens that row `at` emitted, counted over rounds; None where it asks for none."""
        wanted, count = int(self._asked[at % len(self._asked)]), len(block)
        if wanted < 0:
            return None
        own, ranks = self._own[at, :count].tolist(), self._ranks[at, :count].tolist()
        tokens, others = (one[at, :count, :wanted].tolist() for one in (self._likely, self._likely_own))
        top = [list(zip(*pair, strict=True)) for pair in zip(tokens, others, strict=True)]
        return [TokenLogprobs(*one) for one in zip(block, own, ranks, top, strict=True)]
