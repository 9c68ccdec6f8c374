"""Drafts by lookup: the tokens after the latest earlier occurrence of the row's last tokens.

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) searches the text in every round. Here an index grows with
the text, like the tries over prompt and output of SSSD (arXiv 2411.05894).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch

from selfspec.control.plan import MATCH_EDGES, NUM_MATCH_BINS
from selfspec.control.rows import Tally
from selfspec.drafting.early_exit import Draft
from selfspec.model.kv_cache import tensor_of

MOST_MATCHED = 128  # maximum match length; longer matches count as this
_NO_KEY, _MIX = -1, 0x9E3779B1
_BEGINNING = -1  # stands for the token before the first one; equals no token


class Guess(NamedTuple):
    """A draft by lookup."""

    tokens: list[int]
    match: int  # match length
    is_stored: bool = False  # whether the draft comes from a corpus


def num_right(guess: Sequence[int], tokens: Sequence[int]) -> int:
    """The number of leading tokens of a draft that equal the output."""
    count = 0
    for a, b in zip(guess, tokens, strict=False):
        if a != b:
            break
        count += 1
    return count


def given_draft(last: Sequence[int], given: Sequence[Sequence[int]], device: torch.device) -> Draft:
    """The draft of given tokens after each row's last token; all layers verify it (see `Draft.is_unread`)."""
    tokens = tensor_of([one for token, own in zip(last, given, strict=True) for one in (token, *own)], device)
    return Draft(tokens, tokens, [len(own) for own in given])


class Lookup:
    """An index over a row's tokens: the latest earlier occurrence of the longest suffix of the text that has one.

    It is the compressed trie of all contexts, read backwards from each position and cut after `most` tokens. An inner
    node is a context with two different preceding tokens, and stores its latest occurrence; a leaf is a position. A
    token adds at most one inner node and one leaf, after a descent of at most `most` tokens. So a token takes amortised
    constant time and at most 56 bytes.

    Args:
        content: the row's tokens, not copied; tokens may be appended.
        most: maximum match length, 1..255.
    """

    def __init__(self, content: Sequence[int], most: int = MOST_MATCHED) -> None:
        if not 1 <= most <= 255:
            raise ValueError(f"most must lie in 1..255, got {most}")
        self.most = most
        self._content = content
        self._read = 0  # tokens in the index
        self._match, self._place = 0, -1  # of the last token in the index
        self._seen, self._right, self._tallied = [0] * NUM_MATCH_BINS, [0] * NUM_MATCH_BINS, 0  # see `take_tally`
        self._make()

    def _make(self) -> None:
        content = self._content
        self._depths, self._latest = bytearray([0]), array("i", [-1])  # of inner nodes, the root first
        self._count = 0  # nodes in the table: (parent, token) -> inner node, or ~position of a leaf
        self._make_table(len(content) * 2 + 32)

    def __len__(self) -> int:
        """Tokens in the index."""
        return self._read

    @property
    def num_bytes(self) -> int:
        """Memory of the index in bytes, without the tokens."""
        parts = (self._keys, self._nodes, self._latest)
        return sum(part.itemsize * len(part) for part in parts) + len(self._depths)

    @property
    def last(self) -> int:
        """The row's last token."""
        return self._content[-1]

    @property
    def match(self) -> int:
        """The match length: the number of the row's last tokens that occurred before, at most `most`."""
        if self._read < len(self._content):
            self._catch_up()
        return self._match

    def take_tally(self) -> Tally:
        """Statistics of lookup over the tokens since the last call, token by token."""
        if self._read < len(self._content):
            self._catch_up()
        tally = Tally(self._read - self._tallied, self._seen, self._right)
        self._seen, self._right, self._tallied = [0] * NUM_MATCH_BINS, [0] * NUM_MATCH_BINS, self._read
        return tally

    def draft(self, num_tokens: int) -> Guess:
        """Draft `num_tokens` tokens, or none without a match.

        Where the earlier occurrence has fewer tokens after it, the text is a repetition, which the draft continues.
        """
        if self._read < len(self._content):
            self._catch_up()
        if self._match == 0 or num_tokens < 1:
            return Guess([], self._match)
        content, start = self._content, self._place + 1
        period = self._read - start
        if num_tokens <= period:
            return Guess(list(content[start : start + num_tokens]), self._match)
        return Guess([content[start + i % period] for i in range(num_tokens)], self._match)

    def _catch_up(self) -> None:
        while self._read < len(self._content):
            if 4 * (self._count + 2) > 3 * len(self._keys):
                self._grow()
            self._add(self._read)
            self._read += 1

    def _add(self, position: int) -> None:
        """Descend along the tokens up to `position`, backwards, and add a leaf where the path ends."""
        content, keys, nodes, latest, depths = self._content, self._keys, self._nodes, self._latest, self._depths
        if self._match:
            at = bisect_right(MATCH_EDGES, self._match)
            self._seen[at] += 1
            self._right[at] += content[self._place + 1] == content[position]
        node, depth, place, size = 0, 0, -1, len(keys)
        while True:
            key = node << 32 | content[position - depth] + 1
            slot = key * _MIX % size  # `_slot` inlined for speed
            while (there := keys[slot]) != key and there != _NO_KEY:
                slot = slot + 1 if slot + 1 < size else 0
            child = nodes[slot]
            if child > 0:
                place, end = latest[child], depths[child]
            elif child < 0:
                place, end = ~child, self.most
            else:
                self._put(slot, node, content[position - depth], ~position)
                break
            depth += 1
            while depth < end and depth <= place and content[place - depth] == content[position - depth]:
                depth += 1
            if depth < end:
                nodes[slot] = self._split(position, place, depth, child)
                break
            if child < 0:
                nodes[slot] = ~position
                break
            latest[child] = position
            node = child
        self._match, self._place = depth, place

    def _split(self, position: int, place: int, depth: int, child: int) -> int:
        """Insert an inner node above `child` and a leaf at `position`, whose contexts differ after `depth` tokens."""
        node = len(self._depths)
        self._depths.append(depth)
        self._latest.append(position)
        before = self._content[place - depth] if place >= depth else _BEGINNING
        for token, below in ((before, child), (self._content[position - depth], ~position)):
            self._put(self._slot(node, token), node, token, below)
        return node

    def _slot(self, node: int, token: int) -> int:
        """The slot of a node's child in the hash table."""
        keys = self._keys
        key, size = node << 32 | token + 1, len(keys)
        slot = key * _MIX % size
        while keys[slot] != key and keys[slot] != _NO_KEY:
            slot = slot + 1 if slot + 1 < size else 0
        return slot

    def _put(self, slot: int, node: int, token: int, child: int) -> None:
        self._keys[slot], self._nodes[slot] = node << 32 | token + 1, child
        self._count += 1

    def _make_table(self, size: int) -> None:
        size |= 1
        self._keys, self._nodes = array("q", [_NO_KEY]) * size, array("i", bytes(4 * size))

    def _grow(self) -> None:
        keys, nodes = self._keys, self._nodes
        self._count = 0
        self._make_table(len(keys) * 3 // 2)
        for key, child in zip(keys, nodes, strict=True):
            if key != _NO_KEY:
                node, token = key >> 32, (key & 0xFFFFFFFF) - 1
                self._put(self._slot(node, token), node, token, child)
