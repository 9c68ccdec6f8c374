"""Drafts from a corpus: what most often followed, anywhere in it, where a text went as the row's text does now.

The datastore of REST (arXiv 2311.08252) and SSSD (arXiv 2411.05894), with contexts sorted as they are read backwards:
one binary search finds the longest suffix of a context that occurs, and all of its places stand side by side. The file
is mapped, read only: however many processes use it, its pages are in memory once.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from struct import unpack
from typing import Any, NamedTuple

import numpy as np

from selfspec.drafting.datastore_file import DEPTH, PAGE, open_file
from selfspec.drafting.prompt_lookup import Guess
from selfspec.errors import DatastoreError
from selfspec.model.fingerprint import vocabulary_of

MOST_PLACES = 32  # looked at of a match; of more, so many evenly spread ones
NEAR = 16


class Match(NamedTuple):
    """Where a context's last tokens occur in a corpus, each time with something after them."""

    length: int  # how many tokens
    first: int  # of the places, in the order of the index
    end: int  # after the last of them

    @property
    def num_places(self) -> int:
        """How often they occur."""
        return self.end - self.first


class Datastore:
    """An index of a corpus, as `selfspec corpus build` wrote it; any number of threads and processes may read it.

    A builder that replaces the file leaves those who have it open with the old one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        file, self.about = open_file(self.path)
        with file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        about = self.about
        starts = np.frombuffer(self._bytes, "<u4", about.vocab_size + 1, about.starts_at)
        places = np.frombuffer(self._bytes, "<u4", about.num_places, about.places_at)
        # memoryviews give Python's own integers, at a third of the time
        self._start, self._place = (memoryview(np.asarray(part, np.uint32).data) for part in (starts, places))

    @classmethod
    def open(cls, path: str | Path, tokenizer: Any = None) -> Datastore:
        """Map a datastore.

        Args:
            tokenizer: the model's; None leaves it to the caller that the corpus was tokenized with it.

        Raises:
            OSError: the file is not there or cannot be read.
            DatastoreError: it is something else, damaged, or of another format or tokenizer. Only its header is
                checked against damage; `datastore_file.verify` reads everything.
        """
        made = cls(path)
        if tokenizer is not None and vocabulary_of(tokenizer) != made.about.tokenizer:
            raise DatastoreError(f"{path} was built with another tokenizer; build it again with this model")
        return made

    @classmethod
    def of(cls, given: str | Path | Datastore | None, tokenizer: Any = None) -> Datastore | None:
        """The same as `open`, of a path; what is open already is left as it is."""
        if not isinstance(given, str | Path | Datastore | None):
            raise ValueError(f"datastore must be a file or an open selfspec.Datastore, got {given!r}")
        return cls.open(given, tokenizer) if isinstance(given, str | Path) else given

    def check_fits(self, vocab_size: int) -> None:
        """DatastoreError where the corpus was tokenized with more tokens than a model of `vocab_size` knows."""
        if self.about.vocab_size > vocab_size:
            raise DatastoreError(
                f"{self.path} holds a vocabulary of {self.about.vocab_size} tokens and the model knows {vocab_size}; "
                "build it again with this model"
            )

    def find(self, context: Sequence[int], most: int = DEPTH) -> Match | None:
        """The longest suffix of a context, of at most `most` tokens, that occurs in the corpus with more after it.

        Raises:
            ValueError: `most` outside 1..16; contexts are sorted by so many tokens.
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
        beside = [before(places[i]) for i in (slot - 1, slot) if first <= i < end]
        length = max((_num_equal(key, found, width) for found in beside), default=0)
        if length == 0:
            return None
        size = length * width
        key = key[:size]
        near, far = slot - NEAR, slot + NEAR  # few matches reach further: look there before halving the whole range
        if near > first and before(places[near]) != key:
            first = near
        if far < end and before(places[far]) != key:
            end = far
        first = bisect_left(places, key, first, slot, key=before)
        return Match(length, first, bisect_right(places, key, slot, end, key=before))

    def draft(self, context: Sequence[int], num_tokens: int) -> Guess:
        """After the longest match of a context: the most frequent next token, after it again the most frequent, ...

        At most `num_tokens` tokens; fewer where all documents end before, none without a match.
        """
        match = self.find(context)
        if match is None or num_tokens < 1:
            return Guess([], 0 if match is None else match.length)
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
        return Guess(self._tokens(path), match.length)

    def continuations(self, match: Match, num_tokens: int, most_branches: int) -> list[tuple[list[int], int]]:
        """What followed a match, as `(tokens, count)`, the most frequent first.

        Of equally frequent ones, those with the more frequent first token come first.
        Counts are over the places looked at, which are all, or of many 32 that are spread evenly.

        Args:
            num_tokens: of each; fewer where a document ends before.
            most_branches: how many to return at most.
        """
        if num_tokens < 1 or most_branches < 1:
            return []
        counts = Counter([tuple(self._tokens(row)) for row in self._rows(match, num_tokens)])
        first: Counter[int] = Counter()
        for tokens, count in counts.items():
            first[tokens[0]] += count
        order = sorted(counts, key=lambda tokens: (counts[tokens], first[tokens[0]]), reverse=True)
        return [([*tokens], counts[tokens]) for tokens in order[:most_branches]]

    def _key(self, backwards: Sequence[int]) -> bytes:
        """Tokens as cells have them, up to the first that is not in the vocabulary."""
        size, width = self.about.vocab_size, self.about.token_bytes
        if backwards and max(backwards) >= size:
            backwards = list(takewhile(size.__gt__, backwards))
        return b"".join([(token + 1).to_bytes(width, "big") for token in backwards])

    def _rows(self, match: Match, num_tokens: int) -> list[bytes]:
        """The cells that follow at the places looked at, backwards as they are there; a 0 ends a document."""
        step, width, data = -(-match.num_places // MOST_PLACES), self.about.token_bytes, self._bytes
        size = num_tokens * width
        ends = [PAGE + place * width for place in self._place[match.first : match.end : step]]
        return [data[max(end - size, 0) : end] for end in ends]

    def _tokens(self, row: bytes) -> list[int]:
        """Token ids, up to the end of the document."""
        width, size = self.about.token_bytes, self.about.vocab_size
        values = unpack(f">{len(row) // width}{'H' if width == 2 else 'I'}", row)[::-1]
        if 0 in values or max(values, default=0) > size:  # beyond the vocabulary only in a damaged file
            values = tuple(takewhile(lambda value: 0 < value <= size, values))
        return [value - 1 for value in values]


def _num_equal(key: bytes, found: bytes, width: int) -> int:
    """How many first tokens are equal."""
    length, size = 0, len(key)
    while length < size and found[length : length + width] == key[length : length + width]:
        length += width
    return length // width
