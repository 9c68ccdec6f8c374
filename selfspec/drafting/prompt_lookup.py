"""Drafts by lookup in a row's own text: the tokens after the latest earlier occurrence of its last tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from selfspec.core import Draft
from selfspec.drafting.compiled_index import CompiledIndex, new_index
from selfspec.drafting.early_exit import PackedDraft
from selfspec.drafting.ngram_index import MOST_MATCHED, Index, Tally
from selfspec.model.kv_cache import tensor_of


def num_right(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    """The number of leading tokens of a draft that equal the output."""
    count = 0
    for a, b in zip(drafted, tokens, strict=False):
        if a != b:
            break
        count += 1
    return count


def given_draft(last: Sequence[int], given: Sequence[Sequence[int]], device: torch.device) -> PackedDraft:
    """The draft of given tokens after each row's last token; all layers verify it (see `PackedDraft.is_unread`)."""
    tokens = tensor_of([one for token, own in zip(last, given, strict=True) for one in (token, *own)], device)
    return PackedDraft(tokens, tokens, [len(own) for own in given])


class Lookup:
    """Lookup in a row's own text, whose tokens it adds to an index.

    Args:
        content: the row's tokens, not copied; tokens may be appended.
        most: maximum match length, 1..255.
        make: makes the index.
    """

    def __init__(
        self,
        content: Sequence[int],
        most: int = MOST_MATCHED,
        make: Callable[[int, int], Index | CompiledIndex] = new_index,
    ) -> None:
        self.most, self._make, self._content = most, make, content
        self._index: Index | CompiledIndex | None = make(most, len(content))
        self._read = self._tallied = 0  # tokens in the index; of them, those of earlier tallies
        self._match, self._place = 0, -1  # of the last token in the index

    def __len__(self) -> int:
        """Tokens in the index."""
        return self._read

    @property
    def index(self) -> Index | CompiledIndex:
        """The index of all tokens. Compiled rounds may add tokens to it before the row has them."""
        self._catch_up()
        assert self._index is not None
        return self._index

    @property
    def match(self) -> int:
        """The match length: the number of the row's last tokens that occurred before, at most `most`."""
        if self._read < len(self._content):
            self._catch_up()
        return self._match

    def take_tally(self) -> Tally:
        """Statistics of lookup over the tokens since the last call, token by token."""
        counts = self.index.take_counts()
        num_tokens, self._tallied = self._read - self._tallied, self._read
        return Tally(num_tokens, *counts)

    def draft(self, num_tokens: int) -> Draft:
        """Draft `num_tokens` tokens, or none without a match.

        Where the earlier occurrence has fewer tokens after it, the text is a repetition, which the draft continues.
        """
        match = self.match
        if match == 0 or num_tokens < 1:
            return Draft([], match)
        content, start = self._content, self._place + 1
        period = self._read - start
        if num_tokens <= period:
            return Draft(list(content[start : start + num_tokens]), match)
        return Draft([content[start + i % period] for i in range(num_tokens)], match)

    def _catch_up(self) -> None:
        content, index = self._content, self._index
        held = -1 if index is None else len(index)
        self._index = None  # until it is complete again
        is_lost = not 0 <= held <= len(content)  # it has tokens of lost rounds, or there was too little memory
        if index is None or is_lost:
            index, held = self._make(self.most, len(content)), 0
        index.extend(content[held:])
        if is_lost:
            index.take_counts()  # which were taken before
        self._index, self._read, (self._match, self._place) = index, len(content), index.last
