"""`Index`: the latest occurrence of the longest suffix of a context, in a row's own text or in several texts.

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) searches the text in every round. Here an index grows with
the text, like the tries over prompt and output of SSSD (arXiv 2411.05894).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from selfspec.control.plan import MATCH_EDGES, NUM_MATCH_BINS

MOST_MATCHED = 128  # maximum match length; longer matches count as this
SEPARATOR = -1  # ends every text of several; stands for the token before the first one, too; equals no token
_NO_KEY, _MIX = -1, 0x9E3779B1


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
    """An n-gram index over one growing text (`extend`) or over several texts (`add_text`).

    It is the compressed trie of all contexts, read backwards from each position and cut after `most` tokens. An inner
    node is a context with two different preceding tokens, and stores its latest occurrence; a leaf is a position. A
    token adds at most one inner node and one leaf, after a descent of at most `most` tokens. So a token takes amortised
    constant time and at most 64 bytes.

    `kernels/cpu/lookup.cpp` does the same; `compiled_index.CompiledIndex` has its interface.

    Args:
        most: maximum match length, 1..255.
        size: expected number of tokens.
    """

    def __init__(self, most: int = MOST_MATCHED, size: int = 0) -> None:
        if not 1 <= most <= 255:
            raise ValueError(f"most must lie in 1..255, got {most}")
        self.most, self.last = most, Found(0, -1)
        """`last`: the earlier occurrence of the last tokens of the text that `extend` adds to."""
        self._content = array("i")
        self._depths, self._latest = bytearray([0]), array("i", [-1])  # of inner nodes, the root first
        self._count = 0  # nodes in the table: (parent, token) -> inner node, or ~position of a leaf
        self._make_table(size * 2 + 32)
        self._seen, self._right = [0] * NUM_MATCH_BINS, [0] * NUM_MATCH_BINS  # see `take_counts`

    def __len__(self) -> int:
        """Tokens in the index, separators included."""
        return len(self._content)

    @property
    def num_bytes(self) -> int:
        """Memory of the index and its copy of the tokens, in bytes."""
        parts = (self._keys, self._nodes, self._latest, self._content)
        return sum(part.itemsize * len(part) for part in parts) + len(self._depths)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the text, and count how often the token after a match came again."""
        content = self._content
        for token in tokens:
            if self.last.match:
                at = bisect_right(MATCH_EDGES, self.last.match)
                self._seen[at] += 1
                self._right[at] += content[self.last.place + 1] == token
            content.append(token)
            self.last = self._add(len(content) - 1)

    def add_text(self, tokens: Sequence[int], first: int) -> None:
        """Add a text. Only what follows its token `first` is found; the tokens before are context."""
        start = len(self._content)
        self._content.extend([*tokens, SEPARATOR])
        for position in range(start + first, start + len(tokens) - 1):  # the last token has no continuation
            self._add(position)

    def take_counts(self) -> tuple[list[int], list[int]]:
        """By bin of match lengths since the last call: tokens after a match, and those that came again."""
        counts = self._seen, self._right
        self._seen, self._right = [0] * NUM_MATCH_BINS, [0] * NUM_MATCH_BINS
        return counts

    def find(self, context: Sequence[int]) -> Found:
        """The latest occurrence of the longest suffix of a context that occurs with a continuation."""
        content, limit = self._content, min(len(context), self.most)
        node, depth, place = 0, 0, -1
        while depth < limit:
            child = self._nodes[self._slot(node, context[-1 - depth])]
            if not child:
                break
            place, end = (self._latest[child], self._depths[child]) if child > 0 else (~child, self.most)
            depth += 1
            while depth < min(end, limit) and depth <= place and content[place - depth] == context[-1 - depth]:
                depth += 1
            if depth < end or child < 0:
                break
            node = child
        return Found(depth, place)

    def draft(self, place: int, num_tokens: int) -> list[int]:
        """The tokens after `place`, up to the end of its text.

        Where `extend` has not added so many yet, the text is a repetition, which the draft continues.
        """
        content, start = self._content, place + 1
        period = len(content) - start
        tokens = list(content[start : start + num_tokens])
        if num_tokens > period:
            tokens = [content[start + i % period] for i in range(num_tokens)]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def _add(self, position: int) -> Found:
        """Descend along the tokens up to `position`, backwards, and add a leaf where the path ends."""
        if 4 * (self._count + 2) > 3 * len(self._keys):
            self._grow()
        content, keys, nodes, latest, depths = self._content, self._keys, self._nodes, self._latest, self._depths
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
        return Found(depth, place)

    def _split(self, position: int, place: int, depth: int, child: int) -> int:
        """Insert an inner node above `child` and a leaf at `position`, whose contexts differ after `depth` tokens."""
        node = len(self._depths)
        self._depths.append(depth)
        self._latest.append(position)
        before = self._content[place - depth] if place >= depth else SEPARATOR
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
