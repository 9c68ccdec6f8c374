"""What is kept for recordings: `Graphs`, the recordings within a memory budget, and `Storages`, KV pages.

The least recently used recording is dropped first. KV pages outlive an engine, since recordings read and write them at
fixed addresses.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from selfspec.executors.cuda.capture import Capture, Recording
from selfspec.executors.cuda.rounds import RoundInputs, WholeRound
from selfspec.model.kv_cache import PagedCache


class Recorded(NamedTuple):
    """A recorded round with its input buffers and body, which hold the memory that it reads."""

    inputs: RoundInputs
    body: WholeRound
    recording: Recording

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory of the recording and the inputs that it alone reads."""
        return self.recording.num_bytes + self.inputs.num_bytes


class Graphs:
    """Recordings by key.

    Args:
        capture: records bodies.
        budget: bytes of device memory for all recordings and their inputs. The latest recording is kept even if it
            alone exceeds them.
    """

    def __init__(self, capture: Capture, budget: int) -> None:
        self.capture, self.budget = capture, budget
        self._kept: OrderedDict[Hashable, Recorded] = OrderedDict()
        self.num_recorded = 0
        """Recordings made so far, including those dropped since."""
        self.seconds = 0.0
        """Seconds that they took."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory of all recordings and their inputs. What several of them read counts once."""
        shared = {id(one): one.num_bytes for kept in self._kept.values() for one in kept.inputs.shared}
        return sum(one.num_bytes for one in self._kept.values()) + sum(shared.values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable) -> Recorded | None:
        """The recording of a key; None if there is none."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def record(self, key: Hashable, inputs: RoundInputs, body: WholeRound) -> Recorded:
        """Record a round and keep it."""
        begun = perf_counter()
        made = self._kept[key] = Recorded(inputs, body, self.capture.record(body))
        self.num_recorded += 1
        self.seconds += perf_counter() - begun
        while len(self._kept) > 1 and self.num_bytes > self.budget:
            self._kept.popitem(last=False)
        return made

    def forget(self, is_stale: Callable[[Hashable], bool]) -> None:
        """Drop the recordings whose keys are stale."""
        for key in [key for key in self._kept if is_stale(key)]:
            del self._kept[key]


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

    def largest(self, page_size: int) -> PagedCache | None:
        """The pages of the largest unused storage of this page size; None if there is none."""
        sizes = [one.cache for one in self._all if one.user is None and one.cache.page_size == page_size]
        return max(sizes, key=lambda one: one.num_pages, default=None)

    def lend(
        self, num_pages: int, page_size: int, num_layers: int = 0, reserved: int = 0
    ) -> tuple[PagedCache, list[Storage]]:
        """A zeroed cache of this size, and the storages that were dropped for it.

        An unused storage of the same page size that is large enough is reused. If there is none, all unused storages
        are dropped.

        Args:
            reserved: pages that a new storage has at least.
        """
        idle = [one for one in self._all if one.user is None]
        fitting = [one for one in idle if one.cache.page_size == page_size and one.cache.num_pages >= num_pages]
        if fitting:
            storage = min(fitting, key=lambda one: one.cache.num_pages)
            storage.cache.clear()
            idle = []
        else:
            storage = Storage(PagedCache(max(num_pages, reserved), page_size, num_layers))
            self._all = [one for one in self._all if one not in idle] + [storage]
        lent = PagedCache(num_pages, page_size, shares=storage.cache)
        storage.lent = weakref.ref(lent)
        return lent, idle
