"""KV pages that outlive an engine, since recordings read and write them at fixed addresses."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from selfspec.model.kv_cache import PagedCache


@dataclass(eq=False)
class Storage:
    """Pages of all layers, used by one cache at a time."""

    cache: PagedCache  # owns the pages; recordings use them through it
    lent: weakref.ref[PagedCache] | None = None  # the cache that uses the pages

    @property
    def user(self) -> PagedCache | None:
        """The cache that uses the pages; None if it no longer exists."""
        return None if self.lent is None else self.lent()


class Storages:
    """Makes caches, and reuses the pages of caches that no longer exist."""

    def __init__(self) -> None:
        self._all: list[Storage] = []

    def of(self, cache: PagedCache) -> Storage | None:
        """The storage of a cache that `lend` returned; None for other caches."""
        return next((one for one in self._all if one.user is cache), None)

    def lend(self, num_pages: int, page_size: int) -> tuple[PagedCache, list[Storage]]:
        """A zeroed cache of this size, and the storages that were dropped for it.

        An unused storage of the same page size that is large enough is reused. If there is none, all unused storages
        are dropped.
        """
        idle = [one for one in self._all if one.user is None]
        fitting = [one for one in idle if one.cache.page_size == page_size and one.cache.num_pages >= num_pages]
        if fitting:
            storage = min(fitting, key=lambda one: one.cache.num_pages)
            storage.cache.clear()
            idle = []
        else:
            storage = Storage(PagedCache(num_pages, page_size))
            self._all = [one for one in self._all if one not in idle] + [storage]
        lent = PagedCache(num_pages, page_size, shares=storage.cache)
        storage.lent = weakref.ref(lent)
        return lent, idle
