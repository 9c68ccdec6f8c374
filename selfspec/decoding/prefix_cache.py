"""`PrefixCache`: pages whose keys and values several rows read: those of prompts and outputs that begin alike.

A full page is known by the tokens in it and the page before it, so that a chain of pages is a text from its first token
on. Rows that run count as users of their chain. Pages without users stay until their memory is needed, the least
recently used first. A row only writes behind its chain, so no shared page is ever written.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, abc
from itertools import count
from typing import Any, Literal, NamedTuple

from selfspec.core import Sequence
from selfspec.model.gguf_blocks import BlockWeight
from selfspec.model.kv_cache import PagedCache
from selfspec.model.split_model import SplitModel

ROOT = 0  # the number of what is before a text's first page
TYPE: Literal["i"] = "i"  # of the tokens in a key
TOKEN_BYTES = array(TYPE).itemsize


class Key(NamedTuple):
    """What a page holds. Equal keys mean equal texts up to the end of the page, computed in the same shapes."""

    parent: int  # number of the block before
    num_wide: int  # its first tokens that were computed as those of a long prompt; see `SplitModel.num_wide`
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


def bytes_of(tokens: abc.Sequence[int]) -> bytes:
    """Tokens as they are in a key."""
    return array(TYPE, tokens).tobytes()


def num_common(one: bytes, other: bytes) -> int:
    """The number of tokens with which both begin."""
    pairs = zip(memoryview(one).cast(TYPE), memoryview(other).cast(TYPE), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)) // TOKEN_BYTES)


class PrefixCache:
    """Pages of one cache by their texts.

    Args:
        split: what writes them. Pages that were written before its weights were edited in place are not found; none are
            where weights do not count edits, since they were made in inference mode.
    """

    def __init__(self, cache: PagedCache, split: SplitModel) -> None:
        self.cache, self._split = cache, split
        # finding them takes longer than counting their edits; a file's blocks cannot be edited
        self._weights = [weight for weight in split.model.parameters() if not isinstance(weight, BlockWeight)]
        self._blocks: dict[Key, Block] = {}  # full pages
        self._branches: dict[tuple[int, int, bytes], Block] = {}  # full or not; the latest of its parent and token
        self._idle: OrderedDict[Block, None] = OrderedDict()  # without users; every page before the page before it
        self._numbers = count(ROOT + 1)
        self._edits: int | None = None  # of the weights, when the known pages were written
        self.weights: Any = None
        """State of the weights when the call began that has it; see `PrefixStore`."""
        self.num_queried = 0
        """Prompt tokens of the rows that joined."""
        self.num_found = 0
        """Those of them that had keys and values already."""

    @property
    def num_idle_pages(self) -> int:
        """Pages that no running row holds, and whose memory is taken when it is needed."""
        return len(self._idle)

    # ---------------------------------------------------------------------------------------------- rows that join

    def reserve(self, prompt: abc.Sequence[int], num_tokens: int) -> Reserved | None:
        """Pages for a row that begins with `prompt` and comes to `num_tokens`; None where too few are free."""
        need, most = self.cache.pages_for(num_tokens), (len(prompt) - 1) // self.cache.page_size
        if need - most > self._num_available:
            return None
        self._mind_edits()
        blocks = self._found(prompt, most)
        for block in blocks:
            self._take(block)
        if need - len(blocks) > self._num_available:
            self._let_go(blocks)
            return None
        self._free_up(need - len(blocks))
        own = self.cache.reserve((need - len(blocks)) * self.cache.page_size)
        assert own is not None
        num_cached = len(blocks) * self.cache.page_size + self._copied(prompt, blocks, own[0])
        self.num_queried += len(prompt)
        self.num_found += num_cached
        return Reserved([*(block.page for block in blocks), *own], blocks, num_cached)

    def more(self, count: int) -> list[int] | None:
        """Take so many pages that no running row holds; None where there are too few."""
        if count > self._num_available:
            return None
        self._free_up(count)
        return self.cache.more(count)

    def _found(self, prompt: abc.Sequence[int], most: int) -> list[Block]:
        """The known pages with which the prompt begins, without its last token, which the first round reads."""
        blocks = list[Block]()
        if self._edits is None:
            return blocks
        while len(blocks) < most:
            known = self._blocks.get(self._key(prompt, len(prompt), blocks, self.cache.page_size))
            if known is None:
                break
            blocks.append(known)
        return blocks

    def _copied(self, prompt: abc.Sequence[int], blocks: abc.Sequence[Block], to: int) -> int:
        """Copy what the page after these has in common with a known one; the number of tokens."""
        left = len(prompt) - 1 - len(blocks) * self.cache.page_size
        if left <= 0 or self._edits is None:
            return 0
        key = self._key(prompt, len(prompt), blocks, min(left, self.cache.page_size))
        known = self._branches.get(key.branch)
        if known is None:
            return 0
        common = num_common(known.key.tokens, key.tokens)
        self.cache.copy(known.page, to, common)
        return common

    def _key(self, content: abc.Sequence[int], num_prompt: int, blocks: abc.Sequence[Block], length: int) -> Key:
        """Of the page after these."""
        size, start = self.cache.page_size, len(blocks) * self.cache.page_size
        num_wide = min(size, max(0, self._split.num_wide(num_prompt - 1) - start))
        tokens = bytes_of(content[start : start + length])
        return Key(blocks[-1].number if blocks else ROOT, num_wide, tokens)

    # ------------------------------------------------------------------------------------------------ rows that run

    def readers(self, rows: list[Sequence]) -> list[Sequence]:
        """Rows that may read their prompts now.

        Rows take pages that others wrote since they joined. One whose next page another row is about to read waits.
        """
        reading, readers = set[Key](), list[Sequence]()
        for row in rows:
            key = self._next_key(row)
            while key is not None and key in self._blocks:
                self._follow(row, self._blocks[key])
                key = self._next_key(row)
            if key is None or key not in reading:
                readers.append(row)
            if key is not None:
                reading.add(key)
        return readers

    def _next_key(self, row: Sequence) -> Key | None:
        """The key of the full page of its prompt that a row reads next; None where there is none."""
        size, at = self.cache.page_size, len(row.blocks)
        is_known = row.num_edits is not None and row.num_edits == self._edits and row.num_cached // size == at
        if row.request.params.prompt_logprobs is not None:  # it reads all of its prompt, for the logits
            return None
        if not is_known or (at + 1) * size >= row.num_prompt_tokens:
            return None
        return self._key(row.token_ids, row.num_prompt_tokens, row.blocks, size)

    def _follow(self, row: Sequence, block: Block) -> None:
        """Let a row read a known page in place of its next one, of which it may have written a part or all."""
        size, at = self.cache.page_size, len(row.blocks)
        own, written = row.pages[at], row.num_cached - at * size
        self._take(block)
        row.blocks.append(block)
        row.pages = (*row.pages[:at], block.page, *row.pages[at + 1 :])
        self.cache.release([own], max(0, written))
        found = max(0, (at + 1) * size - row.num_cached)
        row.num_cached += found
        row.num_found += found
        self.num_found += found

    def publish(self, rows: list[Sequence]) -> None:
        """Let other rows find the full pages of these."""
        size = self.cache.page_size
        longer = [row for row in rows if row.num_cached // size > len(row.blocks) and row.num_edits is not None]
        edits = self._mind_edits() if longer else None
        for row in longer:
            if row.num_edits != edits:
                continue
            while len(row.blocks) < row.num_cached // size:
                key = self._key(row.token_ids, row.num_prompt_tokens, row.blocks, size)
                known = self._blocks.get(key)
                if known is not None:  # another row wrote the same; so all rows hold the whole chain of their pages
                    self._follow(row, known)
                    continue
                block = Block(key, row.pages[len(row.blocks)], next(self._numbers), users=1)
                row.blocks.append(block)  # first, so that nobody finds a page that its row would free
                self._blocks[key] = block
                self._note(block)

    # ------------------------------------------------------------------------------------------------ rows that end

    def release(self, row: Sequence) -> None:
        """Take the pages of a row that ended, however it ended. Its first `num_cached` tokens have complete keys and
        values, also after an interrupt. A second call, after one that was interrupted, finds nothing to take."""
        self.publish([row])
        pages, blocks, edits = row.pages, row.blocks, row.num_edits
        row.pages, row.blocks, row.num_edits = (), [], None
        size, held = self.cache.page_size, len(blocks)
        left = row.num_cached - held * size
        if 0 < left < size and edits is not None and edits == self._edits:
            key = self._key(row.token_ids, row.num_prompt_tokens, blocks, left)
            block = Block(key, pages[held], next(self._numbers), users=0)
            if self._note(block):
                self._idle[block] = None
                held += 1
            elif (known := self._branches[key.branch]) in self._idle:
                self._idle.move_to_end(known)  # as late as the pages before it
        self.cache.release(pages[held:], max(0, row.max_length - held * size))
        self._let_go(blocks)

    def _note(self, block: Block) -> bool:
        """Let rows that branch off within a page find it; False where a known one has the same tokens and more."""
        place = block.key.branch
        other = self._branches.get(place)
        if other is not None and num_common(other.key.tokens, block.key.tokens) == block.key.num_tokens:
            return False
        self._branches[place] = block
        if other is not None and other.key not in self._blocks:  # not full, so nobody finds it any more
            self._idle.pop(other, None)
            self.cache.release([other.page])
        return True

    def _take(self, block: Block) -> None:
        block.users += 1
        self._idle.pop(block, None)

    def _let_go(self, blocks: abc.Sequence[Block]) -> None:
        """A row does not hold these any more: from the last page to the first, so that a text is freed from its end."""
        forgotten = list[int]()
        for block in reversed(blocks):
            block.users -= 1
            if block.users == 0 and self._blocks.get(block.key) is block:
                self._idle[block] = None
            elif block.users == 0:
                forgotten.append(block.page)
        if forgotten:
            self.cache.release(forgotten)

    # ------------------------------------------------------------------------------------------------------- memory

    @property
    def _num_available(self) -> int:
        return self.cache.num_free_pages + len(self._idle)

    def _free_up(self, num_pages: int) -> None:
        """Free pages until there are so many."""
        self._forget(max(0, num_pages - self.cache.num_free_pages))

    def _forget(self, num_pages: int) -> None:
        """Free so many idle pages, the least recently used ones."""
        pages = list[int]()
        while len(pages) < num_pages:
            block, _ = self._idle.popitem(last=False)
            pages.append(block.page)
            if self._blocks.get(block.key) is block:
                del self._blocks[block.key]
            if self._branches.get(block.key.branch) is block:
                del self._branches[block.key.branch]
        if pages:
            self.cache.release(pages)

    def clear(self) -> None:
        """Free all idle pages, and let no row find those that others still hold."""
        self._forget(len(self._idle))
        self._blocks.clear()
        self._branches.clear()

    def move_to(self, cache: PagedCache) -> None:
        """Go on in another cache with the pages used last, as far as they fit. No row may hold pages.

        The pages before a page were used as lately, so they move, too.
        """
        assert self.cache.num_free_pages + len(self._idle) == self.cache.num_pages, "rows hold pages"
        self._forget(max(0, len(self._idle) - cache.num_free_pages))
        pages = cache.take_over(self.cache, [block.page for block in self._idle])
        for block, page in zip(self._idle, pages, strict=True):
            block.page = page
        self.cache = cache

    def _mind_edits(self) -> int | None:
        """How often weights were edited in place; what is known is forgotten if they were since it was written."""
        edits = self.count_edits()
        if edits != self._edits:
            self.clear()
            self._edits = edits
        return edits

    def count_edits(self) -> int | None:
        """How often weights were edited in place, all together; None where some do not count."""
        if any(weight.is_inference() for weight in self._weights):
            return None
        return sum([weight._version for weight in self._weights])
