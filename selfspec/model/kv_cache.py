"""The KV cache: keys and values in pages, written by position.

A row owns pages. Token `p` of its content is stored in page `p // page_size`, slot `p % page_size`. To roll back, the
caller lowers the row's length; the next round overwrites the rejected slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from selfspec.kernels.large_pages import LargePageAllocator
from selfspec.kernels.rounding import BLOCK, rounded, whole


def tensor_of(numbers: Sequence[int], device: torch.device) -> Tensor:
    """A list as an int64 tensor `[N]`, by numpy, which reads lists several times as fast as torch.

    On CUDA it is copied from pinned memory, so that the host does not wait for what the device runs.
    """
    made = torch.from_numpy(np.array(numbers, np.int64))
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


class Span(NamedTuple):
    """The new tokens of one row in a packed call."""

    pages: Sequence[int]  # all pages of the row, in order of position
    start: int  # position of the first new token in the row's content
    length: int  # number of new tokens, at least 1

    @property
    def positions(self) -> range:
        """The position of each new token in the row's content."""
        return range(self.start, self.start + self.length)


class PagedCache:
    """Storage per layer, `[num_pages, page_size, kv_heads, head_dim]`, allocated when a layer first writes.

    It is filled with zeros, since masked slots must be finite. Layers that keep two bytes per number have scales, too,
    `[num_pages, page_size, kv_heads, blocks of a head]`.

    Args:
        num_layers: the first `num_layers` layers share one tensor if their shapes are equal, so that one operation
            serves all of them.
        shares: another cache whose storage this one uses, with the same page size and at least as many pages.
        rounds: the model's own modules round keys and values, see `selfspec.kernels.rounding`.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int = 0,
        shares: PagedCache | None = None,
        rounds: bool = False,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a cache needs at least one page of one token, got {num_pages} pages of {page_size}")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages))
        self.num_layers, self.rounds = num_layers, rounds
        self._shares = shares
        self._layers: dict[int, tuple[Tensor, ...]] = {} if shares is None else shares._layers
        self._pools: list[Tensor] = []  # [layers, 2, num_pages, page_size, kv_heads, head_dim or blocks]
        self._others: list[Tensor] = []  # storage that is not in it

    @property
    def _store(self) -> PagedCache:
        """The cache that owns the storage. There are no reference cycles, so memory is freed with the last user."""
        return self if self._shares is None else self._shares

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """The capacity in tokens."""
        return self.num_pages * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def reserve(self, num_tokens: int) -> list[int] | None:
        """Take the lowest free pages for `num_tokens` tokens; None where there are too few."""
        count = self.pages_for(num_tokens)
        if count > len(self._free):
            return None
        return [heapq.heappop(self._free) for _ in range(count)]

    def more(self, count: int) -> list[int] | None:
        """Take so many free pages; None where there are too few."""
        return self.reserve(count * self.page_size)

    def release(self, pages: Sequence[int], written: int | None = None) -> None:
        """Zero pages and free them. They are zeroed since masked slots enter products, where a NaN would spread.

        Of layers that keep two bytes per number, only the scales are zeroed: the integers are finite.

        Args:
            written: number of the row's tokens that may have been written; None: all of its pages.
        """
        index, end = list(pages), self.page_size
        if written is not None:
            index, end = index[: self.pages_for(written)], min(end, written)
        for run in _runs(index) if self._store._pools else []:  # slices take half as long as a list
            for pool in self._store._pools:
                if pool.is_floating_point():
                    pool[:, :, run, :end] = 0
        on_device: Tensor | None = None
        if index:
            for storage in filter(Tensor.is_floating_point, self._store._others):
                if on_device is None:
                    on_device = tensor_of(index, storage.device)
                storage[on_device, :end] = 0
        twice = {*pages} & {*self._free}
        assert not twice, f"page {min(twice)} was released twice"
        self._free = sorted([*self._free, *pages])  # one assignment, safe against interrupts; a sorted list is a heap

    def layer(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The storage of one layer; allocated at the first use, like `key` and `value` (`[N, kv_heads, head_dim]`)."""
        known = self._layers.get(layer_idx)
        if known is None:
            known = self._layers[layer_idx] = self._store._place(layer_idx, [key, value])
        keys, values = known  # without scales
        return keys, values

    def two_byte_layer(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The storage of a layer that keeps two bytes per number, see `selfspec.kernels.rounding`.

        Args:
            key: as in `layer`, as is `value`; of any dtype.

        Returns:
            int16 keys and values, and the bfloat16 scales of both, `[num_pages, page_size, kv_heads, blocks]`.
        """
        known = self._layers.get(layer_idx)
        if known is None:
            known = self._layers[layer_idx] = self._store._place(layer_idx, _in_two_bytes(key, value))
        return known

    @property
    def storages(self) -> list[tuple[Tensor, ...]]:
        """Keys and values of every layer that has written, `[num_pages, page_size, kv_heads, head_dim]` each; and the
        scales of both, where it keeps two bytes per number."""
        return list(self._layers.values())

    def _place(self, layer_idx: int, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Storage for tensors like these: keys, values, and possibly the scales of both."""
        made, size, pairs = (
            list[Tensor](),
            (self.num_pages, self.page_size),
            [like[at : at + 2] for at in range(0, len(like), 2)],
        )
        for at, (key, value) in enumerate(pairs):
            alike = key.shape[1:] == value.shape[1:] and key.dtype == value.dtype
            if at == len(self._pools) and alike and self.num_layers:
                # On CPU, zero pages of the operating system; writing zeros would take as long as a prompt's prefill.
                zeros = LargePageAllocator().zeros if key.device.type == "cpu" else key.new_zeros
                self._pools.append(zeros(self.num_layers, 2, *size, *key.shape[1:], dtype=key.dtype))
            pool = self._pools[at] if at < len(self._pools) else None
            fits = pool is not None and key.shape[1:] == pool.shape[4:] and key.dtype == pool.dtype
            if fits and alike and pool is not None and layer_idx < len(pool):
                made += [pool[layer_idx, 0], pool[layer_idx, 1]]
            else:
                others = [one.new_zeros(*size, *one.shape[1:]) for one in (key, value)]
                self._others += others
                made += others
        return tuple(made)

    def clear(self) -> None:
        """Zero all storage."""
        for storage in (*self._store._pools, *self._store._others):
            storage.zero_()

    def copy(self, page: int, to: int, count: int | None = None) -> None:
        """Copy the keys and values of a page, or of its first `count` slots, to another page, in every layer."""
        for storage in (one for layer in self._layers.values() for one in layer):
            storage[to, :count] = storage[page, :count]

    def take_over(self, other: PagedCache, pages: Sequence[int]) -> list[int]:
        """Copy pages of another cache with the same page size to free pages of this one, which are returned."""
        to = self.reserve(len(pages) * self.page_size)
        assert to is not None, f"{len(pages)} pages do not fit into {self.num_free_pages} free ones"
        for layer_idx, storages in other._layers.items():
            if layer_idx not in self._layers:
                self._layers[layer_idx] = self._store._place(layer_idx, [one[0] for one in storages])
            for mine, theirs in zip(self._layers[layer_idx], storages, strict=True):
                mine[to] = theirs[list(pages)]
        return to

    def read(self, layer_idx: int, pages: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[length, kv_heads, head_dim]` of one row, for audits and tests."""
        keys, values, *scales = (each[list(pages)].flatten(0, 1)[:length] for each in self._layers[layer_idx])
        return (whole(keys, scales[0]), whole(values, scales[1])) if scales else (keys, values)


def _in_two_bytes(key: Tensor, value: Tensor) -> list[Tensor]:
    """Empty tensors like those that keep keys and values in two bytes per number."""
    numbers = [one.new_empty(one.shape, dtype=torch.int16) for one in (key, value)]
    blocks = [(*one.shape[:-1], -(-one.shape[-1] // BLOCK)) for one in (key, value)]
    return numbers + [key.new_empty(shape, dtype=torch.bfloat16) for shape in blocks]


def _runs(pages: Sequence[int]) -> list[slice]:
    """Slices of consecutive pages."""
    runs = list[slice]()
    for page in sorted(pages):
        if runs and runs[-1].stop == page:
            runs[-1] = slice(runs[-1].start, page + 1)
        else:
            runs.append(slice(page, page + 1))
    return runs


class PackedRows:
    """One packed call: its rows, the positions of its tokens, and the slots for their keys and values.

    The model's forward receives it as `past_key_values` (and calls `update`) and as the keyword `packed`.
    """

    is_static = False  # whether the call is described in tensors alone, so that its operations can be recorded

    def __init__(self, cache: PagedCache, spans: Sequence[Span], device: torch.device | str = "cpu") -> None:
        self.cache, self.spans, self.device = cache, tuple(spans), torch.device(device)
        self._num_tokens = spans[0].length if len(spans) == 1 else sum([span.length for span in spans])
        self.plans: dict[Any, Any] = {}  # values that an attention backend computes once per call, for all layers
        self.attend: Any = None  # the attention function, set by the split model; None: `attention.attend_rows`
        self.new: tuple[Tensor, Tensor] | None = None
        """The keys and values of the new tokens, `[kv_heads, N, head_dim]`, while a layer's attention runs."""
        self._positions: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """Positions of the tokens, int64 `[1, N]`."""
        if self._positions is None:
            self._positions = self._make_positions()[None]
        return self._positions

    @positions.setter
    def positions(self, positions: Tensor) -> None:
        self._positions = positions

    def _make_positions(self) -> Tensor:
        if len(self.spans) == 1:
            start = self.spans[0].start
            return torch.arange(start, start + self.num_tokens, device=self.device)
        if len(self.spans) == self.num_tokens:
            return tensor_of([span.start for span in self.spans], self.device)
        return tensor_of([p for span in self.spans for p in span.positions], self.device)

    @cached_property
    def _slots(self) -> slice | Tensor:
        size = self.cache.page_size
        if len(self.spans) == 1:
            pages, at, n = self.spans[0]
            runs = _runs(pages[at // size : (at + n - 1) // size + 1])
            if len(runs) == 1 and runs[0].start == pages[at // size]:
                first = runs[0].start * size + at % size
                return slice(first, first + n)
        slots = [pages[p // size] * size + p % size for pages, at, n in self.spans for p in range(at, at + n)]
        return tensor_of(slots, self.device)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def most_tokens(self) -> int:
        """The number of tokens of the longest row, the new ones included."""
        return max([span.start + span.length for span in self.spans])

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values `[1, kv_heads, N, head_dim]`. The model calls it; attention then reads the pages."""
        if self.cache.rounds:
            key, value = rounded(key), rounded(value)
        self.write(layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
        key.packed = self  # type: ignore[attr-defined]  # for layers that pass no keywords to their attention
        return key, value

    def write(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values `[N, kv_heads, head_dim]`; returns the layer's storage."""
        keys, values = self.cache.layer(layer_idx, key, value)
        keys.flatten(0, 1)[self._slots] = key
        values.flatten(0, 1)[self._slots] = value
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
