"""Second choices beside drafts, on the device (Triton). `selfspec.kernels.reference_trees` has the references.

`grow` decides where a draft's second choices are worth drafting and lays out the tree. `follow` reduces a verified tree
to the branch that the output follows, which `accept` then takes as a chain. One program per slot does either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfspec.kernels.checks import check_follow, check_grow
from selfspec.kernels.layout import MOST_NODES, Branches, DraftTree


def grow(
    last: Tensor,
    drafted: Tensor,
    seconds: Tensor,
    sure: Tensor,
    chains: Tensor,
    content: Tensor,
    room: Tensor,
    rule: Tensor,
    edges: Tensor,
    most: int,
) -> DraftTree:
    """Choose second choices as `selfspec.control.plan.likely_alternatives` does, and lay out the trees.

    Args:
        last: int64 `[S]`, the last token of each row.
        drafted: int64 `[S, D]`, its drafted tokens; those beyond its chain are not read.
        seconds: int64 `[S, D]`, their second choices.
        sure: fp32 `[S, D]`, their confidences.
        chains: int64 `[S]`, number of drafted tokens; -1: an empty slot.
        content: int64 `[S]`, tokens that the row holds, the last one included.
        room: int64 `[S]`, tokens that it may still emit.
        rule: fp64 `[2 + 2 * bins]`: `least` and `enough` of `SecondChoices`, then `right`, then `second` by bin.
        edges: fp64 `[bins - 1]`, bounds between the bins of confidence.
        most: maximum second choices per row, at most D. The tree has W = 1 + D + most places for nodes.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_grow`.
    """
    check_grow(last, drafted, seconds, sure, chains, content, room, rule, edges, most)
    slots, length = drafted.shape
    places = 1 + length + most
    tokens, ancestors = drafted.new_empty((2, slots, places))
    parents = drafted.new_empty((slots, places), dtype=torch.int32)
    made, counts = drafted.new_empty((2, slots), dtype=torch.int32)
    positions = drafted.new_empty((slots, MOST_NODES), dtype=torch.int32)
    _grow[(slots,)](
        last, drafted, seconds, sure, chains, content, room, rule, edges,
        tokens, parents, made, counts, positions, ancestors,
        LENGTH=length, MOST=most, EDGES=len(edges), BLOCK=triton.next_power_of_2(length),
        BINS=triton.next_power_of_2(len(edges) + 1), NODES=MOST_NODES, num_warps=4,
    )  # fmt: skip
    return DraftTree(tokens, parents, made, counts, positions, ancestors)


def follow(tree: DraftTree, picks: Tensor, width: int) -> Branches:
    """Follow the chain up to its first wrong token, and the second choice there if it is right.

    Args:
        tree: the drafted nodes.
        picks: int64 `[S * W]`, the target's pick after each node.
        width: places per slot of the result: maximum tokens of a chain, the last token included.

    Raises:
        ValueError: an argument has the wrong dtype, shape, layout or device; see `checks.check_follow`.
    """
    check_follow(tree, picks, width)
    slots, places = tree.tokens.shape
    tokens, own = picks.new_empty((2, slots * width))
    counts, nodes, depths = picks.new_empty((3, slots), dtype=torch.int32)
    _follow[(slots,)](
        tree.tokens, tree.parents, tree.chains, tree.counts, picks, tokens, own, counts, nodes, depths,
        PLACES=places, WIDTH=width, BLOCK=triton.next_power_of_2(places), num_warps=1,
    )  # fmt: skip
    return Branches(tokens, own, counts, nodes, depths)


@triton.jit
def _grow(
    last_ptr, drafted_ptr, seconds_ptr, sure_ptr, chains_ptr, content_ptr, room_ptr, rule_ptr, edges_ptr,
    tokens_ptr, parents_ptr, made_ptr, counts_ptr, positions_ptr, ancestors_ptr,
    LENGTH: tl.constexpr, MOST: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
    NODES: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    chain = tl.load(chains_ptr + slot)
    room = tl.load(room_ptr + slot)
    place, column = tl.arange(0, BLOCK), tl.arange(0, BINS)
    edges = tl.load(edges_ptr + column, mask=column < EDGES, other=float("inf"))
    valid = place < chain
    chance = tl.full((BLOCK,), 0, tl.float64)
    survival = tl.full((), 1, tl.float64)
    for at in range(LENGTH):  # in order, as on the host: rounding must not move a choice
        sure = tl.load(sure_ptr + slot * LENGTH + at).to(tl.float64)
        group = tl.sum((edges <= sure).to(tl.int32), 0)
        right = tl.load(rule_ptr + 2 + group)
        second = tl.load(rule_ptr + 3 + EDGES + group)
        chance = tl.where(place == at, survival * (1 - right) * second, chance)
        survival = survival * right
    above = chance[None, :] > chance[:, None]
    before = (chance[None, :] == chance[:, None]) & (place[None, :] < place[:, None])
    rank = tl.sum(((above | before) & valid[None, :]).to(tl.int32), 1)
    least, enough = tl.load(rule_ptr), tl.load(rule_ptr + 1)
    chosen = valid & (rank < tl.minimum(MOST, room - 1 - chain)) & (chance > least)
    gain = tl.sum(tl.where(chosen, chance - least, 0.0), 0)
    chosen = tl.where(chosen, gain, enough) > enough
    order = tl.cumsum(chosen.to(tl.int32), 0) - 1
    count = tl.where(chain < 0, 0, chain + 1 + tl.sum(chosen.to(tl.int32), 0))
    node = tl.arange(0, NODES)
    of = chosen[None, :] & (order[None, :] == (node - 1 - chain)[:, None])  # [NODES, BLOCK]: node of a second choice
    drawn = tl.where(of, place[None, :], 0)
    parent = tl.where(node <= chain, node - 1, tl.sum(drawn, 1))
    inside = node < count
    parent = tl.where(inside, parent, -1)
    held = place < LENGTH
    firsts = tl.load(drafted_ptr + slot * LENGTH + place, mask=held, other=0)
    others = tl.load(seconds_ptr + slot * LENGTH + place, mask=held, other=0)
    is_next = (place[None, :] + 1 == node[:, None]) & (node <= chain)[:, None]
    token = tl.sum(tl.where(is_next, firsts[None, :], tl.where(of, others[None, :], 0)), 1)
    token = tl.where(node == 0, tl.load(last_ptr + slot), token)
    bit = tl.full((), 1, tl.int64)
    seen = ((bit << (parent + 1).to(tl.int64)) - 1) | (bit << node.to(tl.int64))
    stored = node < 1 + LENGTH + MOST
    at = slot.to(tl.int64) * (1 + LENGTH + MOST) + node
    tl.store(tokens_ptr + at, tl.where(inside, token, 0), mask=stored)
    tl.store(parents_ptr + at, parent.to(tl.int32), mask=stored)
    tl.store(ancestors_ptr + at, tl.where(inside, seen, 0), mask=stored)
    root = tl.load(content_ptr + slot) - 1
    position = tl.where(inside, root + parent + 1, 0)
    tl.store(positions_ptr + slot.to(tl.int64) * NODES + node, position.to(tl.int32))
    tl.store(made_ptr + slot, tl.maximum(chain, 0).to(tl.int32))
    tl.store(counts_ptr + slot, count.to(tl.int32))


@triton.jit
def _follow(
    tokens_ptr, parents_ptr, chains_ptr, counts_ptr, picks_ptr, out_ptr, own_ptr, made_ptr, nodes_ptr, depths_ptr,
    PLACES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    chain, count = tl.load(chains_ptr + slot), tl.load(counts_ptr + slot)
    base = slot.to(tl.int64) * PLACES
    node = tl.arange(0, BLOCK)
    inside = node < count
    own = tl.load(picks_ptr + base + node, mask=inside, other=-1)
    guess = tl.load(tokens_ptr + base + node, mask=inside, other=-1)
    parent = tl.load(parents_ptr + base + node, mask=inside, other=-1)
    after = tl.load(tokens_ptr + base + node + 1, mask=node < chain, other=-1)
    right = tl.min(tl.where((node < chain) & (after != own), node, chain), 0)
    wanted = tl.sum(tl.where(node == right, own, 0), 0)
    fits = (node > chain) & inside & (parent == right) & (guess == wanted)
    taken = tl.max(tl.where(fits, node, 0), 0)  # at most one fits
    place = tl.where((node == right + 1) & (taken > 0), taken, node)
    made = tl.where(count == 0, 0, tl.where(taken > 0, right + 2, chain + 1))
    used = (node < made) & (node < WIDTH)
    at = slot.to(tl.int64) * WIDTH + node
    tl.store(out_ptr + at, tl.load(tokens_ptr + base + place, mask=used, other=0), mask=node < WIDTH)
    tl.store(own_ptr + at, tl.load(picks_ptr + base + place, mask=used, other=0), mask=node < WIDTH)
    tl.store(made_ptr + slot, made)
    tl.store(nodes_ptr + slot, taken)
    tl.store(depths_ptr + slot, right + 1)
