"""The index of `Lookup` in compiled code, where layers are compiled anyway: a token takes it a quarter of the time."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

from selfspec.drafting.lookup import MOST_MATCHED, Lookup
from selfspec.kernels.compiled_call import functions, loaded

AT_ONCE = 64  # tokens told in one call
TOO_LITTLE = "there is too little memory for an index of a row's tokens; decode fewer rows at once, or without lookup"


class CompiledLookup(Lookup):
    """The same index, in about 60 bytes per token.

    Raises:
        NoCompilerError: it cannot be compiled here.
    """

    def _make(self) -> None:
        self._lib = functions()
        self._index = self._lib.selfspec_index_new(self.most, len(self._content))
        if not self._index:
            raise MemoryError(TOO_LITTLE)
        self._told, self._out = (ctypes.c_int64 * AT_ONCE)(), (ctypes.c_int64 * (2 + self.most))()
        weakref.finalize(self, self._lib.selfspec_index_free, self._index).atexit = False

    @property
    def num_bytes(self) -> int:
        """Memory of the index, with a copy of the tokens."""
        return int(self._lib.selfspec_index_bytes(self._index))

    def _catch_up(self) -> None:
        content, told, out = self._content, self._told, self._out
        while self._read < len(content):
            new = content[self._read : self._read + AT_ONCE]
            told[: len(new)] = [*new]
            count = self._lib.selfspec_index_add(self._index, told, len(new), out)
            if count < 0:
                raise MemoryError(TOO_LITTLE)
            self._read += len(new)
        self._match, self._place, *self._shorter = out[: 2 + count]


def lookup_of(content: Sequence[int], most: int = MOST_MATCHED) -> Lookup:
    """An index over a row's tokens: compiled, if anything else is."""
    return Lookup(content, most) if loaded() is None else CompiledLookup(content, most)
