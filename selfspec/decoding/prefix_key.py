"""What a prefix cache knows a page by."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal, NamedTuple

ROOT = 0  # the number of what is before a text's first page
TYPE: Literal["i"] = "i"  # of the tokens in a key
TOKEN_BYTES = array(TYPE).itemsize


class Key(NamedTuple):
    """What a page holds. Equal keys mean equal texts up to the end of the page, computed in the same shapes."""

    parent: int  # number of the block before
    num_wide: int  # its first tokens that were computed as those of a long prompt; see `Stack.num_wide`
    tokens: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def branch(self) -> tuple[int, int, bytes]:
        """Where pages with the same first token are looked for."""
        return self.parent, self.num_wide, self.tokens[:TOKEN_BYTES]


class Block:
    """A page whose tokens are known."""

    __slots__ = ("key", "number", "page", "users")

    def __init__(self, key: Key, page: int, number: int, users: int) -> None:
        self.key, self.page, self.number = key, page, number
        self.users = users  # rows that run and hold it


class Reserved(NamedTuple):
    """Pages of a row that joins."""

    pages: list[int]
    blocks: list[Block]  # of its first pages, which other rows may read, too
    num_cached: int  # first tokens of its prompt that have keys and values: never all of them


def bytes_of(tokens: Sequence[int]) -> bytes:
    """Tokens as they are in a key."""
    return array(TYPE, tokens).tobytes()


def num_common(one: bytes, other: bytes) -> int:
    """The number of tokens with which both begin."""
    pairs = zip(memoryview(one).cast(TYPE), memoryview(other).cast(TYPE), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)) // TOKEN_BYTES)
