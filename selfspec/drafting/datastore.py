"""Drafts from a corpus: the most frequent continuations of a row's last tokens in it.

The datastore of REST (arXiv 2311.08252) and SSSD (arXiv 2411.05894). Contexts are sorted backwards, so that one binary
search finds the longest suffix of a context that occurs, and all its occurrences are adjacent. The file is mapped read
only, so several processes share its memory.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from struct import unpack
from typing import Any, NamedTuple

import numpy as np

from selfspec.control.plan import CORPUS
from selfspec.drafting.datastore_file import DEPTH, PAGE, About, open_file
from selfspec.errors import DatastoreError
from selfspec.kernels import compiled_call
from selfspec.model.fingerprint import vocabulary_of

MOST_PLACES = 32  # occurrences of a match that are read; of more, 32 at equal distances
NEAR = 16  # entries around a hit that are tested before a binary search over the whole range


class Match(NamedTuple):
    """The occurrences of a context's last tokens in a corpus that have a continuation."""

    length: int  # matched tokens
    first: int  # first occurrence in the index
    end: int  # end of the occurrences in the index

    @property
    def num_places(self) -> int:
        """The number of occurrences."""
        return self.end - self.first


class CompiledCorpus:
    """A datastore's file for compiled rounds."""

    def __init__(self, file: mmap.mmap, about: About) -> None:
        self._file, self._lib = file, compiled_call.functions()
        parts = [np.frombuffer(file, np.uint8, 1, at) for at in (PAGE, about.starts_at, about.places_at)]
        sizes = (ctypes.c_int64 * 4)(about.token_bytes, about.num_cells, about.vocab_size, about.num_places)
        self.address = self._lib.selfspec_corpus_new(*[part.ctypes.data for part in parts], sizes)
        if not self.address:
            raise MemoryError("there is too little memory to open a corpus")

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._lib.selfspec_texts_free(self.address)


class Datastore:
    """An index of a corpus, written by `selfspec corpus build`. Safe for several threads and processes.

    Where a file is replaced, open datastores continue to use the old one. `kernels/cpu/corpus.cpp` reads the same file
    for compiled rounds.
    """

    source = CORPUS

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        file, self.about = open_file(self.path)
        self._compiled: CompiledCorpus | None = None
        with file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        about = self.about
        starts = np.frombuffer(self._bytes, "<u4", about.vocab_size + 1, about.starts_at)
        places = np.frombuffer(self._bytes, "<u4", about.num_places, about.places_at)
        # memoryviews return Python integers, three times as fast as numpy
        self._start, self._place = (memoryview(np.asarray(part, np.uint32).data) for part in (starts, places))

    @classmethod
    def open(cls, path: str | Path, tokenizer: Any = None) -> Datastore:
        """Open a datastore.

        Args:
            tokenizer: the model's tokenizer, which is compared with that of the corpus; None: no comparison.

        Raises:
            OSError: the file is missing or cannot be read.
            DatastoreError: it is no datastore, is damaged, or has another format or tokenizer. Only the header is
                checked for damage; `datastore_file.verify` checks all of the file.
        """
        made = cls(path)
        if tokenizer is not None and vocabulary_of(tokenizer) != made.about.tokenizer:
            raise DatastoreError(f"{path} was built with another tokenizer; build it again with this model")
        return made

    @classmethod
    def of(cls, given: str | Path | Datastore | None, tokenizer: Any = None) -> Datastore | None:
        """Open a path; an open datastore and None are returned as they are. Errors as for `open`."""
        if not isinstance(given, str | Path | Datastore | None):
            raise ValueError(f"corpus must be a file or an open selfspec.Datastore, got {given!r}")
        return cls.open(given, tokenizer) if isinstance(given, str | Path) else given

    def compiled(self) -> list[CompiledCorpus] | None:
        """The corpus for compiled rounds; None where compiled code is not loaded."""
        if self._compiled is None and compiled_call.loaded() is not None:
            self._compiled = CompiledCorpus(self._bytes, self.about)
        return None if self._compiled is None else [self._compiled]

    def check_fits(self, vocab_size: int) -> None:
        """Raise DatastoreError where the corpus has a larger vocabulary than `vocab_size`."""
        if self.about.vocab_size > vocab_size:
            raise DatastoreError(
                f"{self.path} has a vocabulary of {self.about.vocab_size} tokens and the model one of {vocab_size}; "
                "build it again with this model"
            )

    def find(self, context: Sequence[int], most: int = DEPTH) -> Match | None:
        """Find the longest suffix of a context, of at most `most` tokens, that occurs with a continuation.

        Raises:
            ValueError: `most` is not in 1..16, the number of tokens by which contexts are sorted.
        """
        if not 1 <= most <= DEPTH:
            raise ValueError(f"most must lie in 1..{DEPTH}, got {most}")
        key = self._key(context[: -most - 1 : -1])
        if not key:
            return None
        first, end = self._start[context[-1]], self._start[context[-1] + 1]
        data, places, width, size = self._bytes, self._place, self.about.token_bytes, len(key)

        def before(place: int) -> bytes:
            at = PAGE + place * width
            return data[at : at + size]

        slot = bisect_left(places, key, first, end, key=before)
        neighbours = [before(places[i]) for i in (slot - 1, slot) if first <= i < end]
        length = max((_num_equal(key, found, width) for found in neighbours), default=0)
        if length == 0:
            return None
        size = length * width
        key = key[:size]
        near, far = slot - NEAR, slot + NEAR  # most matches have few occurrences
        if near > first and before(places[near]) != key:
            first = near
        if far < end and before(places[far]) != key:
            end = far
        first = bisect_left(places, key, first, slot, key=before)
        return Match(length, first, bisect_right(places, key, slot, end, key=before))

    def continuation(self, match: Match, num_tokens: int) -> list[int]:
        """The most frequent tokens after a match, each after those before it.

        At most `num_tokens` tokens; fewer where all documents end.
        """
        if num_tokens < 1:
            return []
        rows, width, path = self._rows(match, num_tokens), self.about.token_bytes, b""
        end = bytes(width)  # of a document
        for _ in range(num_tokens):
            if rows.count(rows[0]) == len(rows):
                path = rows[0]
                break
            size = len(path) + width
            counts: dict[bytes, int] = {}
            for row in rows:
                tail = row[-size:]
                counts[tail] = counts.get(tail, 0) + 1
            counts.pop(end + path, None)
            if not counts:
                break
            path = max(counts, key=counts.__getitem__)
            rows = [row for row in rows if row.endswith(path)]
        return self._tokens(path)

    def _key(self, backwards: Sequence[int]) -> bytes:
        """Tokens in the format of the cells, up to the first one outside the vocabulary."""
        size, width = self.about.vocab_size, self.about.token_bytes
        if backwards and max(backwards) >= size:
            backwards = list(takewhile(size.__gt__, backwards))
        return b"".join([(token + 1).to_bytes(width, "big") for token in backwards])

    def _rows(self, match: Match, num_tokens: int) -> list[bytes]:
        """The cells of the continuations at the sampled occurrences, in backward order; 0 ends a document."""
        step, width, data = -(-match.num_places // MOST_PLACES), self.about.token_bytes, self._bytes
        size = num_tokens * width
        ends = [PAGE + place * width for place in self._place[match.first : match.end : step]]
        return [data[max(end - size, 0) : end] for end in ends]

    def _tokens(self, row: bytes) -> list[int]:
        """Token ids, up to the end of the document."""
        width, size = self.about.token_bytes, self.about.vocab_size
        values = unpack(f">{len(row) // width}{'H' if width == 2 else 'I'}", row)[::-1]
        if 0 in values or max(values, default=0) > size:  # larger values occur in damaged files only
            values = tuple(takewhile(lambda value: 0 < value <= size, values))
        return [value - 1 for value in values]


def _num_equal(key: bytes, found: bytes, width: int) -> int:
    """The number of equal leading tokens."""
    length, size = 0, len(key)
    while length < size and found[length : length + width] == key[length : length + width]:
        length += width
    return length // width
