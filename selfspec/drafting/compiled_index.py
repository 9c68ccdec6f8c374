"""`CompiledIndex`: the n-gram index in compiled code, which takes a quarter of the time per token."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from selfspec.control.plan import NUM_MATCH_BINS
from selfspec.drafting.ngram_index import MOST_MATCHED, Found, Index
from selfspec.kernels import compiled_call as c

AT_ONCE = 64  # tokens added per call
TOO_LITTLE = "there is too little memory for an index of a row's tokens; decode fewer rows at once, or without lookup"


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

    @property
    def num_bytes(self) -> int:
        """See `Index`."""
        return int(self._lib.selfspec_index_bytes(self.address))

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
    return Index(most, size) if c.loaded() is None else CompiledIndex(most, size)
