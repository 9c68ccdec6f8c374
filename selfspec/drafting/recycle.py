"""Recycled candidates: what the model itself thought likely after a token, the last time that it looked.

Verification computes logits at every drafted position, right or wrong, and most are thrown away. Token Recycling (arXiv
2408.08696) keeps the likeliest next tokens of each token; here also those of each pair of tokens, which are more often
right, in a table of fixed size. Rows of an engine share one memory, and no layer runs for such a draft.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.errors import whole

NUM_CANDIDATES = 8
PAIR_BITS = 16
MEMORY = 500  # looks: by then what was counted of ranks has half of its weight
_MIX, _64 = 0x9E3779B97F4A7C15, (1 << 64) - 1
Ints = NDArray[np.signedinteger[Any]]


class Recycled:
    """The latest likeliest next tokens of every token and of many pairs of tokens.

    Memory is at most `4 * k * vocab_size + (8 + 4 * k) * 2**pair_bits` bytes, see `num_bytes`; it grows towards that
    with what is learned. A pair may be forgotten for another one, a token never is.

    Args:
        vocab_size: token ids lie in 0..vocab_size - 1.
        k: candidates kept for each.
        pair_bits: logarithm of the number of pairs that have room, 1..32.
    """

    def __init__(self, vocab_size: int, k: int = NUM_CANDIDATES, pair_bits: int = PAIR_BITS) -> None:
        self.vocab_size, self.k = whole("vocab_size", vocab_size, 1), whole("k", k, 1)
        if whole("pair_bits", pair_bits, 1) > 32:
            raise ValueError(f"pair_bits must lie in 1..32, got {pair_bits}")
        self._shift = 64 - pair_bits
        # Ids plus 1, 0 for none: pages of zeros are not there before they are written.
        self._after = np.zeros((vocab_size, k), np.int32)
        self._after_pair = np.zeros((1 << pair_bits, k), np.int32)
        self._pairs = np.zeros(1 << pair_bits, np.int64)
        # memoryviews give Python's own integers, at a third of the time
        self._views = self._after.reshape(-1).data, self._after_pair.reshape(-1).data
        self._pairs_view = self._pairs.data
        halves = 0.5 ** np.arange(1, k + 1)
        self._hits, self._looks = np.array([halves, halves]), np.ones((2, 1))  # of tokens and of pairs, by rank
        self.has_learned = False
        """Whether anything has candidates."""

    @property
    def num_bytes(self) -> int:
        """The most memory it can take."""
        return self._after.nbytes + self._after_pair.nbytes + self._pairs.nbytes

    @property
    def rates(self) -> NDArray[np.float64]:
        """How often a candidate, by its rank, was likeliest the next time: `[2, k]`, for tokens and for pairs.

        Recent looks count more. Half of the hits for the first rank, a quarter for the second, ... where none was seen.
        """
        return self._hits / self._looks

    def learn(self, tokens: Ints, candidates: Ints, previous: Ints | None = None) -> None:
        """Keep what the model thought likely after tokens; of equal tokens, and of equal pairs, the last one stays.

        Args:
            tokens: `[n]`, the token at each position that was looked at.
            candidates: `[n, any]`, likeliest next tokens at these positions, the likeliest first; -1 for none.
            previous: `[n]`, the token before each, -1 where there is none; None learns of no pair.
        """
        self.has_learned = True
        tokens = np.asarray(tokens, np.int64)
        rows = np.zeros((len(tokens), self.k), np.int32)
        rows[:, : candidates.shape[1]] = candidates[:, : self.k] + 1
        self._count(0, self._after[tokens], rows)
        self._after[tokens] = rows
        if previous is None:
            return
        known = np.flatnonzero(np.asarray(previous) >= 0)
        pairs = np.asarray(previous, np.int64)[known] * self.vocab_size + tokens[known] + 1
        slots = pairs.astype(np.uint64) * np.uint64(_MIX) >> np.uint64(self._shift)
        same = self._pairs[slots] == pairs
        self._count(1, self._after_pair[slots[same]], rows[known[same]])
        self._pairs[slots] = pairs
        self._after_pair[slots] = rows[known]

    def candidates(self, token: int, previous: int = -1) -> list[int]:
        """The likeliest tokens after `token`, the likeliest first; those after the pair where it is remembered."""
        kind, start = self._find(token, previous)
        return [one - 1 for one in dict.fromkeys(self._views[kind][start : start + self.k]) if one]

    def knows_pair(self, token: int, previous: int) -> bool:
        """Whether its candidates are those after the pair."""
        return self._find(token, previous)[0] == 1

    def chain(self, last_tokens: Sequence[int], num_tokens: int) -> list[int]:
        """The likeliest token after a row's last ones, then the likeliest after it, ...; ends where none is known."""
        token, previous = last_tokens[-1], last_tokens[-2] if len(last_tokens) > 1 else -1
        made: list[int] = []
        for _ in range(num_tokens):
            kind, start = self._find(token, previous)
            previous, token = token, self._views[kind][start] - 1
            if token < 0:
                break
            made.append(token)
        return made

    def tree(self, last_tokens: Sequence[int], num_nodes: int, widths: Sequence[int]) -> tuple[list[int], list[int]]:
        """The nodes that are likeliest to be reached, by depth: their tokens, and their parents, -1 for the last token.

        A node's likelihood is the product of the `rates` of the ranks on the way to it. Parents come before children.

        Args:
            num_nodes: at most so many.
            widths: at most so many children of each node, by depth; there are as many levels as widths.
        """
        rates = self.rates.tolist()
        paths: list[tuple[int, ...]] = []  # of the nodes: their tokens from the first drafted one on
        heap: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
        count = 0
        while heap and len(paths) <= num_nodes:
            likelihood, _, path = heapq.heappop(heap)
            paths.append(path)
            if len(path) == len(widths):
                continue
            before = (-1, *last_tokens[-2:], *path)[-2:]
            kind, _ = self._find(before[1], before[0])
            for rank, token in enumerate(self.candidates(before[1], before[0])[: widths[len(path)]]):
                count += 1
                heapq.heappush(heap, (likelihood * rates[kind][rank], count, (*path, token)))
        paths.sort(key=len)
        places = {path: i - 1 for i, path in enumerate(paths)}
        return [path[-1] for path in paths[1:]], [places[path[:-1]] for path in paths[1:]]

    def _find(self, token: int, previous: int) -> tuple[int, int]:
        """Whether the pair is remembered, and where in that table the candidates are."""
        if previous >= 0:
            pair = previous * self.vocab_size + token + 1
            slot = (pair * _MIX & _64) >> self._shift
            if self._pairs_view[slot] == pair:
                return 1, slot * self.k
        return 0, token * self.k

    def _count(self, kind: int, old: NDArray[np.int32], new: NDArray[np.int32]) -> None:
        """At which rank what is likeliest now stood before, where anything was known."""
        known = (old[:, 0] != 0) & (new[:, 0] != 0)
        hits = (old[known] == new[known, :1]).sum(0)
        looks = int(known.sum())
        kept = 0.5 ** (looks / MEMORY)
        self._hits[kind] = self._hits[kind] * kept + hits
        self._looks[kind] = self._looks[kind] * kept + looks
