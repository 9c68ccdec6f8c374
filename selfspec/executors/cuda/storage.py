"""Keys and values that outlive an engine: recordings read and write them at fixed addresses, call after call."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from selfspec.model.kv_cache import PagedCache


@dataclass(eq=False)
class Storage:
    """Pages of every layer; lent to one cache at a time."""

    cache: PagedCache  # the recordings' own access to the pages
    lent: weakref.ref[PagedCache] | None = None

    @property
    def user(self) -> PagedCache | None:
        """The cache it is lent to, as long as anybody holds that."""
        return None if self.lent is None else self.lent()


class Storages:
    """Lends caches out, and lends the same pages again once a cache is no longer used by anybody."""

    def __init__(self) -> None:
        self._all: list[Storage] = []

    def of(self, cache: PagedCache) -> Storage | None:
        """The storage behind a cache that was lent here."""
        return next((one for one in self._all if one.user is cache), None)

    def lend(self, num_pages: int, page_size: int) -> tuple[PagedCache, list[Storage]]:
        """A cache of this size, zeroed, and the storages that were given up for it.

        An idle storage of the same page size that is large enough serves again; idle ones that are not are given up.
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
