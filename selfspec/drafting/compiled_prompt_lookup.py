"""The index of `Lookup` in compiled code, which takes a quarter of the time per token."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from selfspec.control.plan import NUM_MATCH_BINS
from selfspec.control.rows import Tally
from selfspec.drafting.prompt_lookup import MOST_MATCHED, Lookup
from selfspec.kernels.compiled_call import functions, loaded

AT_ONCE = 64  # tokens added per call
TOO_LITTLE = "there is too little memory for an index of a row's tokens; decode fewer rows at once, or without lookup"


class CompiledLookup(Lookup):
    """The same index, with about 60 bytes per token. Compiled rounds add tokens to it before the row has them.

    Raises:
        NoCompilerError: the compiled code cannot be built.
    """

    def _make(self) -> None:
        self._lib = functions()
        self._index: Any = None  # for `_free`, where allocation fails
        self._index = self._lib.selfspec_index_new(self.most, len(self._content))
        if not self._index:
            raise MemoryError(TOO_LITTLE)
        self._buffer, self._state = (ctypes.c_int64 * AT_ONCE)(), (ctypes.c_int64 * 3)()
        self._counts = (ctypes.c_int64 * (2 * NUM_MATCH_BINS))()

    def _free(self) -> None:
        index, self._index = getattr(self, "_index", None), None
        if index:
            self._lib.selfspec_index_free(index)

    def __del__(self) -> None:  # `weakref.finalize` would take several times as long per row
        self._free()

    @property
    def address(self) -> int:
        """The address of the index, for compiled rounds, which add the tokens of the row to it."""
        self._catch_up()
        return int(self._index)

    @property
    def num_bytes(self) -> int:
        """Memory of the index and its copy of the tokens."""
        return int(self._lib.selfspec_index_bytes(self._index))

    def _catch_up(self) -> None:
        content = self._content
        held = self._lib.selfspec_index_state(self._index, self._state) if self._index else -1
        if not 0 <= held <= len(content):  # it has tokens of lost rounds, or there was too little memory
            self._free()
            self._make()
            held = 0
        is_anew = held == 0 < self._read
        while held < len(content):
            new = content[held : held + AT_ONCE]
            self._buffer[: len(new)] = [*new]
            if not self._lib.selfspec_index_add(self._index, self._buffer, len(new)):
                self._free()  # the number of added tokens is unknown
                raise MemoryError(TOO_LITTLE)
            held += len(new)
            self._lib.selfspec_index_state(self._index, self._state)
        self._read, (_, self._match, self._place) = held, self._state
        if is_anew:  # drop the counts, which were taken before
            self._lib.selfspec_index_tally(self._index, self._counts)

    def take_tally(self) -> Tally:
        """See `Lookup`."""
        self._catch_up()
        self._lib.selfspec_index_tally(self._index, self._counts)
        num_tokens, self._tallied = self._read - self._tallied, self._read
        return Tally(num_tokens, self._counts[:NUM_MATCH_BINS], self._counts[NUM_MATCH_BINS:])


def lookup_of(content: Sequence[int], most: int = MOST_MATCHED) -> Lookup:
    """Make an index over a row's tokens; a compiled one where the compiled code is loaded."""
    return Lookup(content, most) if loaded() is None else CompiledLookup(content, most)
