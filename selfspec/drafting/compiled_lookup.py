"""The index of `Lookup` in compiled code, where layers are compiled anyway: a token takes it a quarter of the time."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence

from selfspec.drafting.lookup import MOST_MATCHED, Lookup
from selfspec.kernels.compiled_call import functions, loaded

AT_ONCE = 64  # tokens told in one call
TOO_LITTLE = "there is too little memory for an index of a row's tokens; decode fewer rows at once, or without lookup"


class CompiledLookup(Lookup):
    """The same index, in about 60 bytes per token. Compiled rounds tell it of tokens before its row holds them.

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
        self._held = 0  # tokens in the index, more than are read where it was told of some beforehand
        self._coming: deque[tuple[int, Sequence[int]]] = deque()  # how many it held, and what it told then

    @property
    def place(self) -> int | None:
        """Where the index is, for compiled rounds; None while it holds tokens that the row does not yet."""
        self._catch_up()
        return None if self._coming or self._held > self._read else int(self._index)

    @property
    def told_size(self) -> int:
        """Numbers that it tells at most, with how many there are."""
        return 3 + self.most

    def foresee(self, told: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
        """Compiled rounds told it of so many `tokens` each, after which it told this each time."""
        for count, each in zip(tokens, told, strict=True):
            self._held += count
            self._coming.append((self._held, each))

    @property
    def num_bytes(self) -> int:
        """Memory of the index, with a copy of the tokens."""
        return int(self._lib.selfspec_index_bytes(self._index))

    def _catch_up(self) -> None:
        content, told, out = self._content, self._told, self._out
        while self._coming and self._coming[0][0] <= len(content):
            self._read, (self._match, self._place, *self._shorter) = self._coming.popleft()
        if self._read < len(content) <= self._held:  # only where a row did not go on round by round
            self._match, self._place, self._shorter = 0, -1, []
            return
        while self._held < len(content):
            new = content[self._held : self._held + AT_ONCE]
            told[: len(new)] = [*new]
            count = self._lib.selfspec_index_add(self._index, told, len(new), out)
            if count < 0:
                raise MemoryError(TOO_LITTLE)
            self._held += len(new)
            self._read = self._held
            self._match, self._place, *self._shorter = out[: 2 + count]


def lookup_of(content: Sequence[int], most: int = MOST_MATCHED) -> Lookup:
    """An index over a row's tokens: compiled, if anything else is."""
    return Lookup(content, most) if loaded() is None else CompiledLookup(content, most)
