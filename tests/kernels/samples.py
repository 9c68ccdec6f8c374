"""Random calls of every kernel, in the shapes that decoding has: for checks against the twins, and to compile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.control.plan import CONFIDENCE_EDGES, NUM_BINS
from selfspec.kernels.layout import MOST_NODES, Layout, SamplingTensors, Trees
from selfspec.model.attention_backends import tree_lines
from selfspec.model.kv_cache import Span, Tree


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
    trees: bool = False,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Paged:
    """A random call. `padding`: places after each row's that no row has."""
    made = layout_of(rows, page_size, seed, trees, padding, device)
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
    rows: Sequence[tuple[int, int]], page_size: int, seed: int, trees: bool, padding: int, device: torch.device | str
) -> tuple[Layout, int]:
    """Where the rows of a random call stand, and how many pages there are."""
    dice = random.Random(seed)
    need = [-(-(old + new) // page_size) if new else 0 for old, new in rows]
    free = list(range(sum(need) + 2))
    dice.shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in need]
    owners, slots, starts = list[int](), list[int](), list[int]()
    spans = []
    for slot, (old, new) in enumerate(rows):
        starts.append(len(owners))
        owners += [slot] * new + [-1] * padding
        slots += [tables[slot][at // page_size] * page_size + at % page_size for at in range(old, old + new)]
        slots += [-1] * padding
        tree = None
        if trees and new and dice.random() < 0.8:  # some of whose nodes may have been fed before
            before = dice.randint(0, min(old, 3, MOST_NODES - new))
            tree = Tree((-1, *(dice.randrange(node) for node in range(1, before + new))))
        spans.append(Span(tables[slot], old, new, tree))
    roots, nodes, masks = tree_lines(spans)
    positions, ancestors, seen = list[int](), list[int](), iter(masks)
    for span in spans:
        positions += [*span.positions(), *[0] * padding]
        ancestors += [*(next(seen) for _ in range(span.length)), *[0] * padding]
    width = max(1, *need)

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    layout = Layout(
        ints(starts), ints([new for _, new in rows]), ints([old + new if new else 0 for old, new in rows]),
        ints([table + [1 << 30] * (width - len(table)) for table in tables]), ints(owners),
        ints(slots, torch.int64), ints(positions, torch.int64),
        max(1, *(new for _, new in rows)), max(1, *(old + new for old, new in rows)),
        Trees(ints(roots), ints(nodes), ints(ancestors, torch.int64)) if trees else None,
    )  # fmt: skip
    return layout, sum(need) + 2


class Drafts(NamedTuple):
    """The arguments of `draft_tree.grow`, without the last one."""

    last: Tensor
    drafted: Tensor
    seconds: Tensor
    sure: Tensor
    chains: Tensor
    content: Tensor
    room: Tensor
    rule: Tensor
    edges: Tensor


def drafts(slots: int, length: int, seed: int = 0, device: torch.device | str = "cpu") -> Drafts:
    """Drafts of up to `length` tokens with any confidences, in rows with little room, and a rule; some are empty."""
    rng, dice = torch.Generator().manual_seed(seed), random.Random(seed)
    chains = torch.randint(-1, length + 1, (slots,), generator=rng)
    first, second = torch.randint(0, 9, (2, slots, length), generator=rng)
    second = torch.where(second == first, second + 9, second)
    rates = torch.rand(2 * NUM_BINS, generator=rng, dtype=torch.float64)
    bounds = torch.tensor([dice.choice([-1.0, 0.05, 0.2]), dice.choice([0.0, 0.3])], dtype=torch.float64)
    content = torch.randint(1, 90, (slots,), generator=rng)
    room = 1 + chains.clamp(min=0) + torch.randint(0, length + 2, (slots,), generator=rng)
    given = (
        torch.randint(0, 9, (slots,), generator=rng), first, second, torch.rand(slots, length, generator=rng), chains,
        content, room, torch.cat((bounds, rates)), torch.tensor(CONFIDENCE_EDGES, dtype=torch.float64),
    )  # fmt: skip
    return Drafts(*(one.to(device) for one in given))


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
