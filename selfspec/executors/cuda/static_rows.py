"""The description of a packed call in buffers at fixed addresses, which recordings read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfspec.executors.cuda.shapes import Shape
from selfspec.kernels.layout import Layout
from selfspec.kernels.suite import Kernels
from selfspec.model.attention import Reach
from selfspec.model.kv_cache import PackedRows, PagedCache, Span

NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float64: np.float64}


class StaticRows(PackedRows):
    """`PackedRows` for use inside a recording: its description lies in the tensors of a layout, not on the host.

    It must not be part of a reference cycle: dropping a recording must free the memory of its tensors at once.
    """

    is_static = True

    def __init__(self, cache: PagedCache, layout: Layout, kernels: Kernels) -> None:
        self.cache, self.layout, self._kernels = cache, layout, kernels
        self.spans, self.device = (), layout.positions.device
        self.positions = layout.positions[None]
        self.plans = {}

    @property
    def num_tokens(self) -> int:
        """The number of places for tokens, padding included."""
        return self.layout.positions.shape[0]

    def write(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values, and return the layer's pages; see `PackedRows.write`."""
        keys, values = self.cache.layer(layer_idx, key, value)
        self._kernels.scatter(key, value, keys, values, self.layout.slots)
        return keys, values

    def attend(
        self,
        rows: Any,
        queries: Tensor,  # [heads, N, head_dim]
        keys: Tensor,
        values: Tensor,
        reach: Reach,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of the new tokens; see `selfspec.kernels.paged_attention.attend`."""
        given = (queries.transpose(0, 1), keys, values, self.layout, scale, *reach, softcap, sinks)
        return self._kernels.attend(*given)


class LayersInputs:
    """The input buffers of one recording of layers. `given`: a buffer for tokens or hidden states, shared by all."""

    shared: Sequence[Any] = ()  # see `graphs.Buffers`

    def __init__(self, shape: Shape, cache: PagedCache, given: Tensor) -> None:
        device, self.shape, self.given = given.device, shape, given
        self._page_size = cache.page_size
        self._tables: Sequence[Sequence[int]] = ()
        width = cache.pages_for(shape.most_tokens)
        self._long = torch.zeros((2, shape.tokens), dtype=torch.int64, device=device)
        self._ints = torch.zeros(3 * shape.slots + shape.tokens, dtype=torch.int32, device=device)
        self._pages = torch.zeros((shape.slots, width), dtype=torch.int32, device=device)
        starts, counts, lengths, owners = self._ints.split([shape.slots] * 3 + [shape.tokens])
        self.layout = Layout(
            starts, counts, lengths, self._pages, owners, self._long[0], self._long[1],
            shape.most_new, shape.most_tokens,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers that only this recording reads."""
        return sum(one.nbytes for one in (self._long, self._ints, self._pages))

    def fill(self, spans: Sequence[Span], given: Tensor) -> None:
        """Write a call into the buffers. Unused slots become empty, and unused tokens padding."""
        size, empty = self._page_size, self.shape.slots - len(spans)
        starts, owners, slots, positions = list[int](), list[int](), list[int](), list[int]()
        for row, (pages, first, count, _) in enumerate(spans):
            starts.append(len(owners))
            owners += [row] * count
            positions += spans[row].positions()
            slots += [pages[p // size] * size + p % size for p in range(first, first + count)]
        padding = self.shape.tokens - len(owners)
        counts = [span.length for span in spans] + [0] * empty
        lengths = [span.start + span.length for span in spans] + [0] * empty
        upload(self._long, [slots + [-1] * padding, positions + [0] * padding])
        upload(self._ints, [*starts, *[0] * empty, *counts, *lengths, *owners, *[-1] * padding])
        fill_pages(self._pages, self, [span.pages for span in spans])
        self.given[: len(owners)] = given
        self.given[len(owners) :] = 0


def upload(buffer: Tensor, values: Any) -> None:
    """Write numbers from the host into a buffer, without waiting for the device.

    Every upload has pinned memory of its own, which torch gives out again after the copy.
    """
    source = torch.from_numpy(np.array(values, NUMPY[buffer.dtype]))
    buffer.copy_(source.pin_memory() if buffer.is_cuda else source, non_blocking=True)


def fill_pages(buffer: Tensor, owner: Any, tables: Sequence[Sequence[int]]) -> None:
    """Write the rows' page tables into `buffer`, `[S, P]`, unless `owner` wrote the same ones last.

    Tables are compared without looking into those that are the same objects, so they must not be lists that are changed
    in place. Pages of a row beyond P are left out.
    """
    if owner._tables == tables:
        return
    width = buffer.shape[1]
    lines = [[*table[:width], *[0] * (width - len(table))] for table in tables]
    upload(buffer, lines + [[0] * width] * (len(buffer) - len(lines)))
    owner._tables = tables
