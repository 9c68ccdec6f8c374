"""A draft's head over the tokens that occur most: a small part of a large vocabulary covers nearly all of a text.

In a model of a large vocabulary the head costs as much as several layers, and a draft pays for it at every token. A
draft that is picked among fewer tokens is right nearly as often, and the target judges it over all of them, so that the
output is the same (frequency-ranked drafts: FR-Spec, arXiv 2502.14856). Ranks are learned while running; until then
they are the order of token ids, in which tokenizers number their merges: the most frequent come first.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.model.llama_weights import Linear
from selfspec.model.shortlist import PartHead

AT_LEAST = 256  # new tokens before ranks are learned anew; later, as many as a quarter of all seen
ENOUGH = 0.98  # coverage of what is drafted over, beyond which they need not be: a head is a lot to copy
MOST_NEW = 16384  # tokens kept before they are counted
HALF_LIFE = 64.0  # written tokens after which one counts half in coverage
SUPPOSED, SUPPOSED_WEIGHT = 0.8, 4.0  # coverage before any are written, and for how many of them that counts


class Part:
    """The most frequent tokens as they were ranked last, and how many of those written since it was asked for it held.

    Attributes:
        tokens: int64, ascending.
        members: the same.
        version: how often it was ranked anew.
    """

    def __init__(
        self, tokens: Tensor, version: int, coverage: float = SUPPOSED, weight: float = SUPPOSED_WEIGHT
    ) -> None:
        self.tokens, self.members, self.version = tokens, frozenset(tokens.tolist()), version
        self._written, self._held = weight, weight * coverage

    @property
    def coverage(self) -> float:
        return self._held / self._written

    def count(self, tokens: Sequence[int]) -> None:
        """Count what was written beside what was before; older tokens fade."""
        for token in tokens:
            self._written = 0.5 ** (1 / HALF_LIFE) * self._written + 1
            self._held = 0.5 ** (1 / HALF_LIFE) * self._held + (token in self.members)

    def renewed(self, tokens: Tensor) -> Part:
        """The same of later ranks."""
        return Part(tokens, self.version + 1, self.coverage, self._written)


class Frequencies:
    """How often tokens were seen in prompts and outputs; counted when somebody asks, which is seldom.

    A part is ranked anew from time to time, as long as it misses some of what is written. Threads may share it.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._new: list[tuple[Sequence[int], bool]] = []  # what is not counted yet, and whether it was written
        self._num_new = 0  # tokens of it
        self._counts: Counter[int] = Counter()
        self._seen = self._ranked = 0
        self._parts: dict[int, Part] = {}
        self._lock = threading.RLock()

    def add(self, tokens: Iterable[int], written: bool = False) -> None:
        """Count tokens of a prompt, or those that the model has `written`."""
        with self._lock:
            self._new.append((list(tokens), written))
            self._num_new += len(self._new[-1][0])
            if self._num_new >= MOST_NEW:
                self._settle()

    def _settle(self) -> None:
        """Count what is new as it came: which tokens are the most frequent changes in between."""
        new, self._new, self._num_new = self._new, [], 0
        for tokens, written in new:
            for part in self._parts.values() if written else ():
                part.count(tokens)
            self._counts.update(tokens)
            self._seen += len(tokens)
            if self._seen - self._ranked >= max(AT_LEAST, self._ranked // 4):
                self._ranked = self._seen
                for size, part in self._parts.items():
                    if part.coverage < ENOUGH:
                        self._parts[size] = part.renewed(self._top(size))

    def part(self, size: int) -> Part:
        """The `size` most frequent tokens as they were ranked last; the same until they are ranked anew."""
        with self._lock:
            self._settle()
            if size not in self._parts:
                self._ranked = self._seen
                self._parts[size] = Part(self._top(size), 0)
            return self._parts[size]

    def coverage(self, size: int) -> float:
        """How many of the lately written tokens were among the `size` most frequent before they were written."""
        return self.part(size).coverage

    def top(self, size: int) -> Tensor:
        """The most frequent tokens, int64 `[size]`, ascending; those never seen by their ids."""
        with self._lock:
            self._settle()
            return self._top(size)

    def _top(self, size: int) -> Tensor:
        seen = sorted(self._counts, key=lambda token: (-self._counts[token], token))[:size]
        known = set(seen)
        rest = (token for token in range(self.vocab_size) if token not in known)
        return torch.tensor(sorted([*seen, *(next(rest) for _ in range(size - len(seen)))]))


class Subset(NamedTuple):
    """Some tokens of a vocabulary, and the head's rows for them."""

    tokens: Tensor  # int64 [size], ascending
    linear: Linear  # copies
    made_of: tuple[int, int]  # the part's version and the head's, when it was made
    made: dict[Any, Any]  # what a body makes of it is kept here as long as it holds


class DraftHead(PartHead):
    """The head over a subset of the vocabulary, by copies of its rows that are kept while they are up to date."""

    def __init__(self, head: Any, linear: nn.Linear, name: str) -> None:
        super().__init__(head, linear, name)
        self._subsets: dict[int, Subset] = {}

    def subset(self, size: int, frequencies: Frequencies) -> Subset:
        """The most frequent tokens as ranked now, with the head's weights as they are now."""
        weight, known = self.linear.weight, self._subsets.get(size)
        part = frequencies.part(size)
        made_of = (part.version, 0 if weight.is_inference() else weight._version)
        if known is None or known.made_of != made_of:
            known = self._subsets[size] = self.of_tokens(part.tokens, made_of)
        return known

    def of_tokens(self, tokens: Tensor, made_of: tuple[int, int] = (0, 0)) -> Subset:
        """The head's rows for these tokens (int64 `[size]`, ascending), with its weights as they are now."""
        weight, bias = self.linear
        tokens = tokens.to(weight.device)
        with torch.inference_mode(False), torch.no_grad():
            rows = Linear(weight.detach()[tokens], None if bias is None else bias.detach()[tokens])
        return Subset(tokens, rows, made_of, {})

    def logits(self, hidden: Tensor, subset: Subset) -> Tensor:
        """Logits `[N, size]` in fp32 of a subset, from hidden states `[N, hidden_size]` after the final norm."""
        return self.through(hidden, lambda states: F.linear(states, *subset.linear))
