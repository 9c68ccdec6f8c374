"""Drafts over the most frequent tokens of the vocabulary (FR-Spec, arXiv 2502.14856).

With a large vocabulary the head takes as long as several layers, at every drafted token. A head over the most frequent
tokens is faster, and these tokens cover most of a text. Verification is over the whole vocabulary, so the output is
the same. Tokens are counted while decoding; before that, low token ids count as frequent, as in tokenizers by merges.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.model.llama_weights import Linear
from selfspec.model.shortlist import PartHead

MIN_NEW = 256  # new tokens before the tokens are ranked again; at least a quarter of those counted before
GOOD_COVERAGE = 0.98  # coverage from which on a part is not ranked again, since copying rows of the head takes time
MAX_UNCOUNTED = 16384  # tokens that are kept before they are counted
HALF_LIFE = 64.0  # of coverage, in output tokens
PRIOR_COVERAGE, PRIOR_WEIGHT = 0.8, 4.0  # coverage without output tokens, and the number of tokens it counts as

DIVISOR, LEAST_SIZE = 8, 4096  # of the default draft vocabulary
FOCUS_COVERAGE, LEAST_FOCUS = 0.99, 2048  # of the texts that heads were trained for; other texts have more tokens
DEAR_HEAD = 2  # layers: a head that weighs more drafts over a part of the vocabulary by default


def default_size(vocab_size: int, head_weights: int, layer_weights: int) -> int | None:
    """The default size of a draft vocabulary, from the number of weights of the head and of a layer; None: all."""
    size = vocab_size // DIVISOR
    return size if size >= LEAST_SIZE and head_weights > DEAR_HEAD * layer_weights else None


def covering_size(counts: Mapping[int, int]) -> int:
    """The number of most frequent tokens that cover `FOCUS_COVERAGE` of some texts' tokens, as a multiple of 64."""
    missing, size = FOCUS_COVERAGE * sum(counts.values()), 0
    for count in sorted(counts.values(), reverse=True):
        if missing <= 0:
            break
        missing, size = missing - count, size + 1
    return max(LEAST_FOCUS, size + -size % 64)


class Part:
    """The most frequent tokens at the last ranking, and their coverage of the output since.

    Attributes:
        tokens: int64, ascending.
        members: the same tokens as a set.
        version: number of rankings before.
    """

    def __init__(
        self, tokens: Tensor, version: int, coverage: float = PRIOR_COVERAGE, weight: float = PRIOR_WEIGHT
    ) -> None:
        self.tokens, self.members, self.version = tokens, frozenset(tokens.tolist()), version
        self._written, self._held = weight, weight * coverage

    @property
    def coverage(self) -> float:
        """The share of recent output tokens that are members."""
        return self._held / self._written

    def count(self, tokens: Sequence[int]) -> None:
        """Count output tokens; older ones decay."""
        for token in tokens:
            self._written = 0.5 ** (1 / HALF_LIFE) * self._written + 1
            self._held = 0.5 ** (1 / HALF_LIFE) * self._held + (token in self.members)

    def renewed(self, tokens: Tensor) -> Part:
        """The part of a later ranking, with the same coverage."""
        return Part(tokens, self.version + 1, self.coverage, self._written)


class Frequencies:
    """Frequencies of tokens in prompts and outputs. Tokens are counted lazily, at the next use.

    Parts with low coverage are ranked again from time to time. Thread-safe.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._new: list[tuple[Sequence[int], bool]] = []  # uncounted tokens, and whether they are output
        self._num_new = 0  # number of uncounted tokens
        self._counts: Counter[int] = Counter()
        self._seen = self._ranked = 0
        self._parts: dict[int, Part] = {}
        self._lock = threading.RLock()
        self.focus: int | None = None
        """The size of a draft vocabulary for the texts of `add_counts`; None: there were none."""

    def add(self, tokens: Iterable[int], written: bool = False) -> None:
        """Add tokens of a prompt or, with `written`, of the output."""
        with self._lock:
            self._new.append((list(tokens), written))
            self._num_new += len(self._new[-1][0])
            if self._num_new >= MAX_UNCOUNTED:
                self._count_new()

    def add_counts(self, counts: Mapping[int, int]) -> None:
        """Add tokens that occurred so often in other texts; those beyond the vocabulary do not count."""
        with self._lock:
            known = {token: count for token, count in counts.items() if 0 <= token < self.vocab_size}
            self._counts.update(known)
            self._seen += sum(known.values())
            self._parts = {}
            self.focus = covering_size(known) if known else self.focus

    def _count_new(self) -> None:
        """Count the new tokens in their order, ranking again in between where due."""
        new, self._new, self._num_new = self._new, [], 0
        for tokens, written in new:
            for part in self._parts.values() if written else ():
                part.count(tokens)
            self._counts.update(tokens)
            self._seen += len(tokens)
            if self._seen - self._ranked >= max(MIN_NEW, self._ranked // 4):
                self._ranked = self._seen
                for size, part in self._parts.items():
                    if part.coverage < GOOD_COVERAGE:
                        self._parts[size] = part.renewed(self._top(size))

    def part(self, size: int) -> Part:
        """The `size` most frequent tokens at the last ranking; the same object until the next one."""
        with self._lock:
            self._count_new()
            if size not in self._parts:
                self._ranked = self._seen
                self._parts[size] = Part(self._top(size), 0)
            return self._parts[size]

    def has_part(self, size: int) -> bool:
        """Whether tokens were ranked for `part`."""
        return size in self._parts

    def coverage(self, size: int) -> float:
        """The share of recent output tokens that were among the `size` most frequent tokens before them."""
        return self.part(size).coverage

    def top(self, size: int) -> Tensor:
        """The most frequent tokens now, int64 `[size]`, ascending; tokens without a count follow by id."""
        with self._lock:
            self._count_new()
            return self._top(size)

    def _top(self, size: int) -> Tensor:
        seen = torch.tensor(
            sorted(self._counts, key=lambda token: (-self._counts[token], token))[:size], dtype=torch.int64
        )
        is_known = torch.zeros(self.vocab_size, dtype=torch.bool)
        is_known[seen] = True
        rest = (~is_known[:size]).nonzero()[: size - len(seen), 0]
        is_known[rest] = True
        return is_known.nonzero()[:, 0]


class Subset:
    """Tokens of the vocabulary, and the head's rows for them.

    Attributes:
        tokens: int64 `[size]`, ascending.
        made_of: versions of the part and of the head's weight.
        made: cache for values that a `Body` derives from this subset.
    """

    def __init__(self, tokens: Tensor, head: Linear, made_of: tuple[int, int]) -> None:
        self.tokens, self.made_of, self._head = tokens, made_of, head
        self.made: dict[Any, Any] = {}

    @cached_property
    def linear(self) -> Linear:
        """Copies of the head's rows, made at the first use."""
        return self._head.select(self.tokens)


class HeldSubset(Subset):
    """A subset at fixed addresses, which recordings read. It takes over other subsets of its size."""

    def __init__(self, subset: Subset) -> None:
        super().__init__(subset.tokens.clone(), subset._head, subset.made_of)
        self.num_bytes = sum(one.nbytes for one in (self.tokens, *self.linear) if one is not None)
        """Bytes of memory of its tokens and rows."""

    def take(self, subset: Subset) -> None:
        """Become another subset of the same size and head, by copies on the device; nothing if it is the same one."""
        if subset.made_of == self.made_of:
            return
        self.made_of, self._head = subset.made_of, subset._head
        self.tokens.copy_(subset.tokens)
        for held, whole in zip(self.linear, self._head, strict=True):
            if held is not None and whole is not None:
                torch.index_select(whole.detach(), 0, self.tokens, out=held)


class DraftHead(PartHead):
    """The head over a subset of the vocabulary. Its rows are cached until ranking or weights change."""

    def __init__(self, head: Any, linear: nn.Linear, name: str) -> None:
        super().__init__(head, linear, name)
        self._subsets: dict[int, Subset] = {}

    def subset(self, size: int, frequencies: Frequencies) -> Subset:
        """The `size` most frequent tokens, with the head's current weights."""
        weight, known = self.linear.weight, self._subsets.get(size)
        part = frequencies.part(size)
        made_of = (part.version, 0 if weight.is_inference() else weight._version)
        if known is None or known.made_of != made_of:
            known = self._subsets[size] = self.of_tokens(part.tokens, made_of)
        return known

    def of_tokens(self, tokens: Tensor, made_of: tuple[int, int] = (0, 0)) -> Subset:
        """These tokens (int64 `[size]`, ascending), with the head's current weights."""
        head = self.linear
        return Subset(tokens.to(head.weight.device), head, made_of)

    def logits(self, hidden: Tensor, subset: Subset) -> Tensor:
        """Logits `[N, size]` in fp32 of a subset, from hidden states `[N, hidden_size]` after the final norm."""
        return self.through(hidden, lambda states: F.linear(states, *subset.linear))
