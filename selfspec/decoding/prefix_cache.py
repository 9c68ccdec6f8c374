"""`PrefixCache`: keys and values of the row that ended last, for a prompt that begins as that row's content does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfspec.decoding.row import Row
from selfspec.model.kv_cache import PagedCache


class PrefixCache:
    """Keeps one ended row's pages until another request needs them.

    Args:
        model: keys and values that were computed before its weights were edited in place are not reused; none are where
            weights do not count edits, since they were made in inference mode.
    """

    def __init__(self, cache: PagedCache, model: Any) -> None:
        self._cache, self._model = cache, model
        self._pages: list[int] = []
        self._tokens: list[int] = []  # whose keys and values are in them
        self._written = 0  # positions, from the first on, that may have been written
        self._edits: int | None = None

    def keep(self, row: Row) -> None:
        """Take over the pages of a row that ended, however it ended; those of the row before are given back.

        Its first `num_cached` tokens have complete keys and values, also after an interrupt. None are reused if weights
        were edited after the row joined.
        """
        self.drop()
        self._pages, self._written = row.pages, row.limit
        self._tokens, self._edits = row.content[: row.num_cached], row.num_edits

    def drop(self) -> None:
        """Give the pages back."""
        pages, self._pages, self._tokens = self._pages, [], []
        if pages:
            self._cache.release(pages, self._written)

    def reserve(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], int] | None:
        """Pages for a row that begins with `prompt` and comes to `num_tokens`; None where too few are free.

        Returns:
            the pages, and how many of the prompt's first tokens have keys and values in them: never all of them.
        """
        common = self._num_common(prompt)
        count, own = self._cache.pages_for(num_tokens), self._pages
        missing = count - (len(own) if common else 0)
        if not common and missing > self._cache.num_free_pages >= missing - len(own):
            self.drop()
        more = self._cache.reserve(missing * self._cache.page_size) if missing > 0 else []
        if more is None or not common:
            return None if more is None else (more, 0)
        self._pages, self._tokens = [], []
        if own[count:]:
            self._cache.release(own[count:])
        self._cache.wipe(own[:count], common, self._written)
        return [*own[:count], *more], common

    def _num_common(self, prompt: Sequence[int]) -> int:
        if not self._tokens or self._edits is None or self._edits != self.count_edits():
            return 0
        most = min(len(self._tokens), len(prompt) - 1)  # the first round feeds the last token
        return next((i for i in range(most) if self._tokens[i] != prompt[i]), most)

    def count_edits(self) -> int | None:
        """How often weights were edited in place, all together; None where some do not count."""
        weights = list(self._model.parameters())
        return None if any(w.is_inference() for w in weights) else sum([w._version for w in weights])
