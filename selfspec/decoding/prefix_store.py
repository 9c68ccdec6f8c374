"""`PrefixStore`: keys and values that an opened model keeps between calls."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from torch import Tensor

from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.model.gguf_blocks import BlockWeight
from selfspec.model.quantized import dense, is_dense
from selfspec.model.split_model import SplitModel

LINE = 1024  # numbers of 8 bytes


class PrefixStore:
    """The prefix cache of the call that ended last, for the next one. While a call has it, others begin with none."""

    def __init__(self) -> None:
        self._kept: dict[SplitModel, PrefixCache] = {}
        self._lock = Lock()

    @torch.inference_mode()
    def take(self, split: SplitModel, num_tokens: int, most_kept: int, page_size: int) -> PrefixCache:
        """A prefix cache for rows of `num_tokens` tokens together, with what was kept for this split model.

        It grows to hold what was kept, too, up to `most_kept` tokens. On a device it has that size at once, since
        recordings are made for one storage. Only one caller gets what was kept.
        """
        with self._lock:
            prefix = self._kept.pop(split, None)
        weights = state_of(split) if most_kept else None
        need, most = (-(-tokens // page_size) for tokens in (num_tokens, max(num_tokens, most_kept)))
        if prefix is None or prefix.cache.page_size != page_size:
            size = need if split.runner is None else most
            prefix = PrefixCache(split.new_cache(size, page_size), split)
        if prefix.weights != weights:
            prefix.clear()
        prefix.weights = weights
        size, full = prefix.cache.num_pages, prefix.num_idle_pages + need
        if full > size and split.runner is None:
            size = max(size, min(most, max(full, 2 * size)))
        elif need > size and split.runner is not None:
            need = split.runner.pages_in_place_of(prefix.cache, need)
        if max(size, need) > prefix.cache.num_pages:
            prefix.move_to(split.new_cache(max(size, need), page_size))
        return prefix

    @torch.inference_mode()
    def keep(self, split: SplitModel, prefix: PrefixCache, most_kept: int) -> None:
        """Keep a prefix cache whose rows have ended, on CPU at most so many tokens of it; its caller must not use it
        again. One that another call left meanwhile is dropped for it."""
        most = most_kept // prefix.cache.page_size
        if most < 1:
            return
        if prefix.cache.num_pages > most and split.runner is None:
            prefix.move_to(split.new_cache(most, prefix.cache.page_size))
        with self._lock:
            self._kept[split] = prefix


def state_of(split: SplitModel) -> Any:
    """What changes when weights do, also by edits that they do not count, through `.data` or numpy.

    Where rounds are recorded, only counted edits and other memory: sums over weights would take longer than a token.
    """
    if split.compiled is not None:
        return split.compiled.version  # `SplitModel.refresh(deeply=True)` has compared all weights
    if split.runner is not None:
        every = split.model.parameters()
        return [(one.data_ptr(), 0 if one.is_inference() else one._version) for one in every if is_dense(one)]
    weights = [one.detach() for one in split.model.parameters() if not isinstance(one, BlockWeight)]
    return torch.stack(list(map(_checksum, weights))).tolist()


def _checksum(weight: Tensor) -> Tensor:
    """Sums over all bits of a weight, which depend on their places."""
    flat = dense(weight).contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    end = len(flat) // (8 * LINE) * 8 * LINE
    lines = flat[:end].view(torch.int64).view(-1, LINE)
    parts = [lines.sum(0), lines.sum(1), flat[end:].long()]
    sums = [(part * torch.arange(1, len(part) + 1, device=part.device)).sum() for part in parts]
    return torch.stack(sums)
