"""N-gram indices: the latest occurrence of the longest suffix of a context, in a growing text or in several texts.

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) searches the text in every round. Here an index grows with
the text, like the tries over prompt and output of SSSD (arXiv 2411.05894). `CompiledIndex` is the index in C++, in
amortised constant time per token; `Index` does the same where no compiled code is loaded.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from selfspec.control.plan import MATCH_EDGES, NUM_MATCH_BINS
from selfspec.kernels import compiled_call as c

MOST_MATCHED = 128  # maximum match length; longer matches count as this
SEPARATOR = -1  # ends every text of several, and equals no token
AT_ONCE = 64  # tokens added per compiled call
TOO_LITTLE = "there is too little memory for an index of a row's tokens; decode fewer rows at once, or without lookup"


class Tally(NamedTuple):
    """Statistics of lookup over a row's new tokens, by bin of the match before each token."""

    num_tokens: int
    seen: Sequence[int]  # tokens after a match of this bin
    right: Sequence[int]  # those that equal the token after the earlier occurrence


class Found(NamedTuple):
    """An occurrence of a context's last tokens."""

    match: int  # the number of these tokens; 0: none
    place: Any  # where the texts have it; -1: nowhere


class Index:
    """An index over one growing text (`extend`) or over several texts (`add_text`).

    It keeps the positions of every pair of tokens, and compares the contexts there.

    Args:
        most: maximum match length, 1..255.
    """

    def __init__(self, most: int = MOST_MATCHED) -> None:
        if not 1 <= most <= 255:
            raise ValueError(f"most must lie in 1..255, got {most}")
        self.most, self.last = most, Found(0, -1)
        """`last`: the earlier occurrence of the last tokens of the text that `extend` adds to."""
        self._content: list[int] = []
        self._latest: dict[int, int] = {}  # the latest position of a token
        self._places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # of pairs: where the second token is
        self._seen, self._right = [0] * NUM_MATCH_BINS, [0] * NUM_MATCH_BINS  # see `take_counts`

    def __len__(self) -> int:
        """Tokens in the index, separators included."""
        return len(self._content)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the text, and count how often the token after a match came again."""
        for token in tokens:
            if self.last.match:
                at = bisect_right(MATCH_EDGES, self.last.match)
                self._seen[at] += 1
                self._right[at] += self._content[self.last.place + 1] == token
            self._content.append(token)
            self.last = self.find(self._content)
            self._add(len(self._content) - 1)

    def add_text(self, tokens: Sequence[int], first: int) -> None:
        """Add a text. Only what follows its token `first` is found; the tokens before are context."""
        start = len(self._content)
        self._content += [*tokens, SEPARATOR]
        for position in range(start + first, start + len(tokens) - 1):  # the last token has no continuation
            self._add(position)

    def _add(self, position: int) -> None:
        token = self._content[position]
        self._latest[token] = position
        if position:
            self._places[self._content[position - 1], token].append(position)

    def take_counts(self) -> tuple[list[int], list[int]]:
        """By bin of match lengths since the last call: tokens after a match, and those that came again."""
        counts = self._seen, self._right
        self._seen, self._right = [0] * NUM_MATCH_BINS, [0] * NUM_MATCH_BINS
        return counts

    def find(self, context: Sequence[int]) -> Found:
        """The latest occurrence of the longest suffix of a context that occurs with a continuation."""
        place = self._latest.get(context[-1], -1) if len(context) else -1
        best, content = Found(int(place >= 0), place), self._content
        limit = min(len(context), self.most)
        if place < 0 or limit < 2:
            return best
        for place in reversed(self._places.get((context[-2], context[-1]), ())):
            match = 2
            while match < limit and match <= place and content[place - match] == context[-1 - match]:
                match += 1
            if match > best.match:
                best = Found(match, place)
            if match == limit:
                break
        return best

    def draft(self, place: int, num_tokens: int) -> list[int]:
        """The tokens after `place`, up to the end of its text.

        Where `extend` has not added so many yet, the text is a repetition, which the draft continues.
        """
        content, start = self._content, place + 1
        period = len(content) - start
        tokens = content[start : start + num_tokens]
        if num_tokens > period:
            tokens = [content[start + i % period] for i in range(num_tokens)]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


class CompiledIndex:
    """The same as `Index`, with about 60 bytes per token. Compiled rounds read it and add tokens to it.

    Several threads may call `find` and `draft` while another one calls `add_text`.

    Args:
        most: maximum match length, 1..255.
        size: expected number of tokens.

    Raises:
        NoCompilerError: the compiled code cannot be built.
        MemoryError: there is too little memory.
    """

    def __init__(self, most: int = MOST_MATCHED, size: int = 0) -> None:
        self._lib, self.most, self.address = c.functions(), most, 0
        self.address = self._lib.selfspec_index_new(most, size)
        """For compiled rounds."""
        if not self.address:
            raise MemoryError(TOO_LITTLE)
        self._buffer, self._state = (ctypes.c_int64 * AT_ONCE)(), (ctypes.c_int64 * 3)()

    def __del__(self) -> None:  # `weakref.finalize` would take several times as long per row
        if getattr(self, "address", 0):
            self._lib.selfspec_texts_free(self.address)

    def __len__(self) -> int:
        """See `Index`; compiled rounds may have added tokens."""
        return int(self._lib.selfspec_index_state(self.address, self._state))

    @property
    def last(self) -> Found:
        """See `Index`."""
        self._lib.selfspec_index_state(self.address, self._state)
        return Found(self._state[1], self._state[2])

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Index`. After a MemoryError, the number of added tokens is unknown."""
        for start in range(0, len(tokens), AT_ONCE):
            new = tokens[start : start + AT_ONCE]
            self._buffer[: len(new)] = [*new]
            if not self._lib.selfspec_index_add(self.address, self._buffer, len(new)):
                raise MemoryError(TOO_LITTLE)

    def add_text(self, tokens: Sequence[int], first: int) -> None:
        """See `Index`."""
        if not self._lib.selfspec_index_add_text(
            self.address, (ctypes.c_int64 * len(tokens))(*tokens), len(tokens), first
        ):
            raise MemoryError(
                "there is too little memory for an index of finished responses; keep fewer tokens of them"
            )

    def take_counts(self) -> tuple[list[int], list[int]]:
        """See `Index`."""
        counts = (ctypes.c_int64 * (2 * NUM_MATCH_BINS))()
        self._lib.selfspec_index_counts(self.address, counts)
        return counts[:NUM_MATCH_BINS], counts[NUM_MATCH_BINS:]

    def find(self, context: Sequence[int]) -> Found:
        """See `Index`."""
        return find(self.address, context, self.most)

    def draft(self, place: int, num_tokens: int) -> list[int]:
        """See `Index`."""
        return draft(self.address, Found(1, place), num_tokens)


def find(address: int, context: Sequence[int], most: int) -> Found:
    """`Texts::find` of compiled texts, which reads at most the last `most` tokens."""
    tokens, found = context[-most:], c.Found()
    array = (ctypes.c_int32 * len(tokens))(*tokens)
    c.functions().selfspec_texts_find(address, array, len(tokens), ctypes.byref(found))
    return Found(found.match, found.place)


def draft(address: int, found: Found, num_tokens: int) -> list[int]:
    """`Texts::draft` of compiled texts: at most `num_tokens` tokens."""
    tokens = (ctypes.c_int64 * num_tokens)()
    count = c.functions().selfspec_texts_draft(address, ctypes.byref(c.Found(*found)), num_tokens, tokens)
    return tokens[:count]


def new_index(most: int = MOST_MATCHED, size: int = 0) -> Index | CompiledIndex:
    """An index; a compiled one where the compiled code is loaded."""
    return Index(most) if c.loaded() is None else CompiledIndex(most, size)
