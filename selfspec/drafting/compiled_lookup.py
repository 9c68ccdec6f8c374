"""The index of `Lookup` in compiled code, where layers are compiled anyway: a token takes it a quarter of the time."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Any

from selfspec.control.rows import Tally
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
        self._index: Any = None  # until there is memory for it
        self._index = self._lib.selfspec_index_new(self.most, len(self._content))
        if not self._index:
            raise MemoryError(TOO_LITTLE)
        self._told, self._out = (ctypes.c_int64 * AT_ONCE)(), (ctypes.c_int64 * (4 + self.most))()
        self._held = 0  # tokens in the index, more than are read where it was told of some beforehand
        self._coming: deque[tuple[int, Sequence[int]]] = deque()  # how many it held, and what it told then
        self._is_lent = self._is_anew = False
        self._uncounted: list[tuple[int, int]] = []  # of tokens, what `selfspec_index_add` told of guesses

    def _give_back(self) -> None:
        index, self._index = getattr(self, "_index", None), None
        if index:
            self._lib.selfspec_index_free(index)

    def __del__(self) -> None:  # a finalizer of `weakref` takes several times as long to make, for every row
        self._give_back()

    @property
    def may_lend(self) -> bool:
        """Whether it holds no tokens beforehand."""
        self._catch_up()
        return not self._coming

    def lend(self) -> int:
        """Where the index is, for compiled rounds that tell it of tokens; only where it `may_lend`.

        It is theirs until `foresee` says what they told it.
        """
        self._catch_up()
        self._is_lent = True
        return int(self._index)

    @property
    def told_size(self) -> int:
        """Numbers that it tells at most, with how many there are."""
        return 5 + self.most

    def foresee(self, told: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
        """Compiled rounds told it of so many `tokens` each, after which it told this each time."""
        for count, each in zip(tokens, told, strict=True):
            self._held += count
            self._coming.append((self._held, each))
        self._is_lent = False

    def _begin_anew(self) -> None:
        """The row went on in another way than the index was told, or nobody knows what it was told."""
        self._take_on()
        self._is_lent = True  # until it is made: there may be too little memory
        self._give_back()
        self._read = 0
        self._make()
        self._is_anew = (
            True  # most of its tokens were counted: a few are left out, of tally and `guessed`, and none counts twice
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the index, with a copy of the tokens."""
        return int(self._lib.selfspec_index_bytes(self._index))

    def _catch_up(self) -> None:
        content, told, out = self._content, self._told, self._out
        while self._coming and self._coming[0][0] <= len(content):
            self._read, (self._match, self._place, seen, right, *self._shorter) = self._coming.popleft()
            if seen:
                self._uncounted.append((seen, right))
        if self._is_lent or self._read < len(content) <= self._held:
            self._begin_anew()
        while self._held < len(content):
            new = content[self._held : self._held + AT_ONCE]
            told[: len(new)] = [*new]
            count = self._lib.selfspec_index_add(self._index, told, len(new), out)
            if count < 0:
                self._is_lent = True  # nobody knows how many of them it took
                raise MemoryError(TOO_LITTLE)
            self._held += len(new)
            self._read = self._held
            self._match, self._place, seen, right, *self._shorter = out[: 4 + count]
            if not self._is_anew and seen:
                self._uncounted.append((seen, right))
        self._is_anew = False

    @property
    def guessed(self) -> Sequence[int]:
        """See `Lookup`."""
        if self._read < len(self._content):
            self._catch_up()
        self._take_on()
        return self._right

    def take_tally(self) -> Tally:
        """See `Lookup`."""
        if self._read < len(self._content):
            self._catch_up()
        self._take_on()
        return super().take_tally()

    def _take_on(self) -> None:
        """Take on what came after matches, a byte per bin: many tokens' at once, when somebody asks."""
        uncounted, self._uncounted = self._uncounted, []
        for told in uncounted:
            for counts, each in zip((self._seen, self._right), told, strict=True):
                for at, count in enumerate(each.to_bytes(8, "little", signed=True)[: len(counts)]):
                    counts[at] += count


def lookup_of(content: Sequence[int], most: int = MOST_MATCHED) -> Lookup:
    """An index over a row's tokens: compiled, if anything else is."""
    return Lookup(content, most) if loaded() is None else CompiledLookup(content, most)
