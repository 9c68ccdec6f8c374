"""`Responses`: the responses that were finished before, in which later requests look drafts up.

Suffix decoding (arXiv 2411.04975) drafts from earlier outputs, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from selfspec.control.plan import RESPONSES
from selfspec.drafting.ngram_index import MOST_MATCHED, CompiledIndex, Index, new_index
from selfspec.errors import whole

MOST_TOKENS = 200_000  # of all responses; at about 60 bytes each, their index takes at most 12 MB


class Match(NamedTuple):
    """The latest occurrence of a context's last tokens."""

    length: int
    place: int
    texts: Index | CompiledIndex  # that have it


class _Generation:
    """The responses of one part of the time."""

    def __init__(self) -> None:
        self.index = new_index()
        self.hashes = set[int]()  # of the texts


class Responses:
    """An index of finished responses, at most `most_tokens` tokens of them. Safe for several threads.

    A text is the end of a prompt and its response. Nothing but the response is drafted; a later prompt that quotes the
    same document has it in its own text. There are two generations of responses: the younger takes new texts until it
    holds half of `most_tokens`; then it becomes the older one, and the older one is dropped. A response that was used
    is part of the response that used it, which is new. So what has not been used for longest goes first, as the least
    recently used, and no text is deleted on its own.

    Args:
        most_tokens: separators between texts included, at least 2; a response longer than half of it is not kept.
    """

    source = RESPONSES

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self.most_tokens = whole("most_tokens", most_tokens, 2)
        self._lock = Lock()
        self.clear()

    def __len__(self) -> int:
        """Tokens of all texts, separators included."""
        with self._lock:
            return sum(len(generation.index) for generation in self._generations)

    def clear(self) -> None:
        """Forget all responses."""
        with self._lock:
            self._generations: tuple[_Generation, ...] = ()  # the younger first

    def add(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Add a finished response. One that the younger generation has already is not added again."""
        context = prompt[-MOST_MATCHED:]
        text = (*context, *response)
        if not response or len(text) + 1 > self.most_tokens // 2:
            return
        with self._lock:
            young = self._generations[0] if self._generations else None
            if young is not None and hash(text) in young.hashes:
                return
            if young is None or len(young.index) + len(text) + 1 > self.most_tokens // 2:
                young = _Generation()
                self._generations = (young, *self._generations[:1])
            try:
                young.index.add_text(text, len(context) - 1)
            except BaseException:  # an interrupt, or too little memory: the index may be incomplete
                self._generations = self._generations[1:]
                raise
            young.hashes.add(hash(text))

    def find(self, context: Sequence[int]) -> Match | None:
        """The longest suffix of a context that a response continues; among equals, the latest."""
        with self._lock:
            found = [(generation.index, generation.index.find(context)) for generation in self._generations]
        best = max(found, key=lambda one: one[1].match, default=None)
        return None if best is None or not best[1].match else Match(*best[1], best[0])

    def continuation(self, match: Match, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that follow a match, up to the end of its response."""
        with self._lock:
            return match.texts.draft(match.place, num_tokens)

    def compiled(self) -> list[CompiledIndex] | None:
        """The indices for compiled rounds; None if one is not compiled."""
        with self._lock:
            indices = [generation.index for generation in self._generations]
        compiled = [index for index in indices if isinstance(index, CompiledIndex)]
        return compiled if len(compiled) == len(indices) else None
