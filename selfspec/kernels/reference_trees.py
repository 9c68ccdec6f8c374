"""Reference implementations, in torch, of the kernels of drafts with second choices. They never wait, either."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.kernels.checks import check_follow, check_grow, check_move
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
    """The reference of `selfspec.kernels.draft_tree.grow`."""
    check_grow(last, drafted, seconds, sure, chains, content, room, rule, edges, most)
    length = drafted.shape[1]
    place, chain = torch.arange(length, device=last.device), chains[:, None]
    chosen = _chosen(sure, chains, room, rule, edges, most)
    order = chosen.long().cumsum(1) - 1
    count = torch.where(chain < 0, 0, chain + 1 + chosen.sum(1, keepdim=True))
    node = torch.arange(MOST_NODES, device=last.device)
    of = chosen[:, None] & (order[:, None] == (node - 1 - chain)[:, :, None])  # [S, nodes, D]
    inside = node < count
    parents = torch.where(node <= chain, node - 1, torch.where(of, place, 0).sum(2))
    parents = torch.where(inside, parents, -1)
    next_in_chain = (place + 1 == node[:, None]) & (node <= chain)[:, :, None]
    picked = torch.where(next_in_chain, drafted[:, None], torch.where(of, seconds[:, None], 0)).sum(2)
    tokens = torch.where(inside, torch.where(node == 0, last[:, None], picked), 0)
    one = torch.ones_like(node)
    ancestors = torch.where(inside, ((one << (parents + 1)) - 1) | (one << node), 0)
    positions = torch.where(inside, content[:, None] + parents, 0)
    kept = slice(0, 1 + length + most)
    return DraftTree(
        tokens[:, kept].contiguous(), parents[:, kept].int().contiguous(), chains.clamp(min=0).int(),
        count[:, 0].int(), positions.int(), ancestors[:, kept].contiguous(),
    )  # fmt: skip


def _chosen(sure: Tensor, chains: Tensor, room: Tensor, rule: Tensor, edges: Tensor, most: int) -> Tensor:
    """Whether each drafted token's second choice is drafted, bool `[S, D]`."""
    place = torch.arange(sure.shape[1], device=sure.device)
    right, second = rule[2:].view(2, -1)[:, torch.bucketize(sure.double(), edges, right=True)]
    survival = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1].cumprod(1)], 1)
    chance, valid = survival * (1 - right) * second, place < chains[:, None]
    mine, other = chance[:, :, None], chance[:, None]
    ahead = (other > mine) | ((other == mine) & (place < place[:, None]))
    rank = (ahead & valid[:, None]).sum(2)
    most_here = (room - 1 - chains).clamp(max=most)
    chosen = valid & (rank < most_here[:, None]) & (chance > rule[0])
    gain = torch.where(chosen, chance - rule[0], 0).sum(1, keepdim=True)
    return chosen & (gain > rule[1])


def follow(tree: DraftTree, picks: Tensor, width: int) -> Branches:
    """The reference of `selfspec.kernels.draft_tree.follow`."""
    check_follow(tree, picks, width)
    places = tree.tokens.shape[1]
    node = torch.arange(places, device=picks.device)
    own, chain, count = picks.view(-1, places), tree.chains[:, None].long(), tree.counts[:, None].long()
    wrong = (node < chain) & (tree.tokens.roll(-1, 1) != own)
    right = torch.where(wrong, node, chain).amin(1, keepdim=True)
    fits = (node > chain) & (node < count) & (tree.parents == right) & (tree.tokens == own.gather(1, right))
    taken = torch.where(fits, node, 0).amax(1, keepdim=True)
    made = torch.where(count == 0, 0, torch.where(taken > 0, right + 2, chain + 1))
    place = torch.where((node == right + 1) & (taken > 0), taken, node)[:, :width]
    used = node[:width] < made
    tokens, after = (torch.where(used, one.gather(1, place), 0).flatten() for one in (tree.tokens, own))
    counts, nodes, depths = (one[:, 0].int() for one in (made, taken, right + 1))
    return Branches(tokens, after, counts, nodes, depths)


def move(keys: Tensor, values: Tensor, source: Tensor, target: Tensor) -> None:
    """The reference of `selfspec.kernels.kv_scatter.move`."""
    check_move(keys, values, source, target)
    real = target >= 0
    # Moves without a target repeat the first one that has a target. If none has, its place keeps its contents.
    first = torch.where(real, torch.arange(len(target), device=target.device), real.int().argmax())
    start, to = source[first].clamp(min=0), target[first].clamp(min=0)
    for pages in (keys, values):
        flat = pages.flatten(0, 1)
        flat[to] = flat[torch.where(real.any(), start, to)]
