"""Random calls of every kernel, in the shapes that decoding has: for checks against the twins, and to compile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.kernels.layout import Layout, SamplingTensors


class Paged(NamedTuple):
    """A call of attention: queries, pages that hold every row's content, and NaN wherever no row has written."""

    queries: Tensor  # [N, heads, head_dim]
    key: Tensor  # [N, kv_heads, head_dim], the new tokens', which lie in the pages too
    value: Tensor
    keys: Tensor  # [pages, page_size, kv_heads, head_dim]
    values: Tensor
    layout: Layout


def paged(
    rows: Sequence[tuple[int, int]],  # (tokens held before, new tokens), a slot each; no new tokens: an empty slot
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    seed: int = 0,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Paged:
    """A random call. `padding`: places after each row's that no row has."""
    made = layout_of(rows, page_size, seed, padding, device)
    layout, num_pages = made
    rng = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=dtype, device=device)

    storage = []
    for _ in range(2):
        pages = torch.full((num_pages, page_size, kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
        for slot, (old, new) in enumerate(rows):
            if new:
                at = torch.arange(old + new, device=device)
                page = layout.pages[slot].long()[at // page_size]
                pages[page, at % page_size] = normal(old + new, kv_heads, head_dim)
        storage.append(pages)
    places = layout.slots.clamp(min=0)
    key, value = (pages.flatten(0, 1)[places].nan_to_num() for pages in storage)
    return Paged(normal(len(places), heads, head_dim), key, value, *storage, layout)


def layout_of(
    rows: Sequence[tuple[int, int]],
    page_size: int,
    seed: int = 0,
    padding: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[Layout, int]:
    """The layout of a random call, and the number of its pages."""
    dice = random.Random(seed)
    need = [-(-(old + new) // page_size) if new else 0 for old, new in rows]
    free = list(range(sum(need) + 2))
    dice.shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in need]
    owners, slots, starts, positions = list[int](), list[int](), list[int](), list[int]()
    for slot, (old, new) in enumerate(rows):
        starts.append(len(owners))
        owners += [slot] * new + [-1] * padding
        slots += [tables[slot][at // page_size] * page_size + at % page_size for at in range(old, old + new)]
        slots += [-1] * padding
        positions += [*range(old, old + new), *[0] * padding]
    width = max(1, *need)

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    layout = Layout(
        ints(starts), ints([new for _, new in rows]), ints([old + new if new else 0 for old, new in rows]),
        ints([table + [1 << 30] * (width - len(table)) for table in tables]), ints(owners),
        ints(slots, torch.int64), ints(positions, torch.int64),
        max(1, *(new for _, new in rows)), max(1, *(old + new for old, new in rows)),
    )  # fmt: skip
    return layout, sum(need) + 2


def sampling(kinds: Sequence[tuple[float, int, float, float]], seed: int, device: torch.device | str = "cpu") -> Any:
    """How places pick, from (temperature, top_k, top_p, min_p) of each; seeds and positions are random."""
    rng = torch.Generator().manual_seed(seed)
    temperature, top_k, top_p, min_p = (torch.tensor(each, device=device) for each in zip(*kinds, strict=True))
    seeds = torch.randint(-(1 << 62), 1 << 62, (len(kinds),), generator=rng).to(device)
    positions = torch.randint(0, 1 << 17, (len(kinds),), generator=rng).to(device)
    filtered = any(k or p < 1 or m for _, k, p, m in kinds)
    return SamplingTensors(
        temperature.float(), top_k.int(), top_p.float(), min_p.float(), seeds, positions,
        any(kind[0] > 0 for kind in kinds), filtered,
    )  # fmt: skip
