"""Second choices on the device: twins as the host decides, and kernels as their twins."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec.control.acceptance import likely_seconds
from selfspec.control.plan import CONFIDENCE_EDGES, NUM_BINS, SecondChoices
from selfspec.executors.verdict import walk
from selfspec.kernels import reference_trees
from selfspec.kernels.layout import MOST_NODES
from selfspec.model.attention_backends import tree_lines
from selfspec.model.kv_cache import Span, Tree
from tests.kernels.samples import Drafts, drafts

draft_tree = pytest.importorskip("selfspec.kernels.draft_tree", reason="Triton is not installed")
kv_scatter = pytest.importorskip("selfspec.kernels.kv_scatter", reason="Triton is not installed")

shapes = {"slots": st.integers(1, 4), "length": st.integers(1, 7), "seed": st.integers(0, 1 << 16)}


def expected(given, slot, most):
    """The tree of one slot as the host makes it: tokens and tree; nothing for an empty slot."""
    chain, rule = int(given.chains[slot]), given.rule.tolist()
    if chain < 0:
        return None
    choices = SecondChoices(tuple(rule[2 : 2 + NUM_BINS]), tuple(rule[2 + NUM_BINS :]), rule[0], most, rule[1])
    room = int(given.room[slot]) - 1 - chain
    found = likely_seconds(choices, given.sure[slot, :chain].tolist(), min(most, room))
    tokens = [int(given.last[slot]), *given.drafted[slot, :chain].tolist()]
    return tokens + given.seconds[slot, found].tolist(), Tree((-1, *range(chain), *found))


@settings(max_examples=60)
@given(**shapes, most=st.integers(1, 7))
def test_the_twin_chooses_what_the_host_chooses(slots, length, seed, most):
    given, most = drafts(slots, length, seed), min(most, length)
    made = reference_trees.grow(*given, most)
    for slot in range(slots):
        wanted = expected(given, slot, most)
        if wanted is None:
            assert int(made.counts[slot]) == 0
            continue
        tokens, tree = wanted
        count = len(tokens)
        assert int(made.counts[slot]) == count and int(made.chains[slot]) == int(given.chains[slot])
        assert made.tokens[slot, :count].tolist() == tokens
        assert made.parents[slot, :count].tolist() == list(tree.parents)
        root = int(given.content[slot]) - 1
        _, [positions], ancestors = tree_lines([Span((0,), root, count, tree)])
        assert made.positions[slot, :count].tolist() == positions[:count]
        assert made.ancestors[slot, :count].tolist() == ancestors


@settings(max_examples=12)
@given(**shapes, most=st.integers(1, 7))
def test_the_kernel_chooses_as_its_twin(slots, length, seed, most):
    given, most = drafts(slots, length, seed), min(most, length)
    for got, wanted in zip(draft_tree.grow(*given, most), reference_trees.grow(*given, most), strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)


def test_as_many_nodes_as_a_mask_has_bits():
    given = drafts(3, 32, 0)
    rule = given.rule.clone()
    rule[:2] = -1  # every second choice is worth it
    given = given._replace(chains=torch.tensor([32, 32, 5]), room=torch.tensor([99, 40, 99]), rule=rule)
    made = [grow(*given, 31) for grow in (draft_tree.grow, reference_trees.grow)]
    assert made[0].counts.tolist() == [MOST_NODES, 40, 11]
    for got, wanted in zip(*made, strict=True):
        assert torch.equal(got, wanted)


def verified(slots, length, seed, most):
    """A tree, and picks of the target that often agree with it."""
    tree, dice = reference_trees.grow(*drafts(slots, length, seed), most), random.Random(seed)
    picks = torch.randint(0, 9, tree.tokens.shape, generator=torch.Generator().manual_seed(seed))
    for slot, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        for node in range(int(tree.counts[slot]) - 1, 0, -1):
            if dice.random() < 0.6:
                picks[slot, parents[node]] = tokens[node]
    return tree, picks


@settings(max_examples=60)
@given(**shapes, most=st.integers(1, 7))
def test_the_twin_follows_the_branch_that_the_host_walks(slots, length, seed, most):
    tree, picks = verified(slots, length, seed, min(most, length))
    width = length + 1
    made = reference_trees.follow(tree, picks.flatten(), width)
    for slot in range(slots):
        count, tokens, own = int(tree.counts[slot]), tree.tokens[slot].tolist(), picks[slot].tolist()
        chain = int(tree.chains[slot])
        if count == 0:
            assert int(made.counts[slot]) == 0
            continue
        path = walk(Tree(tuple(tree.parents[slot, :count].tolist())), tokens[1:count], own[:count])
        taken = path[-1] if path[-1] > chain else 0
        assert int(made.nodes[slot]) == taken
        right = len(path) - 1 - (taken > 0)
        assert int(made.depths[slot]) == right + 1
        branch = path if taken else list(range(chain + 1))
        assert int(made.counts[slot]) == len(branch)
        at = slice(slot * width, slot * width + len(branch))
        assert made.tokens[at].tolist() == [tokens[node] for node in branch]
        assert made.picks[at].tolist() == [own[node] for node in branch]


@settings(max_examples=12)
@given(**shapes, most=st.integers(1, 7))
def test_the_kernel_follows_as_its_twin(slots, length, seed, most):
    tree, picks = verified(slots, length, seed, min(most, length))
    made = [follow(tree, picks.flatten(), length + 1) for follow in (draft_tree.follow, reference_trees.follow)]
    for got, wanted in zip(*made, strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(8, 8), (80, 48)])
@pytest.mark.parametrize("targets", [(-1, 4, 0), (-1, -1, -1), (0, -1, 3)])
def test_moves_change_their_targets_and_nothing_else(targets, dims, dtype):
    pages = [torch.randn(3, 4, 2, dim).to(dtype) for dim in dims]
    sources = torch.tensor([7, 9, 11])
    for one in pages:
        one.flatten(0, 1)[6] = float("nan")
    wanted = [one.clone().flatten(0, 1) for one in pages]
    for one in wanted:
        for source, target in zip(sources.tolist(), targets, strict=True):
            if target >= 0:
                one[target] = one[source]
    for move in (kv_scatter.move, reference_trees.move):
        got = [one.clone() for one in pages]
        move(*got, sources, torch.tensor(targets))
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one.flatten(0, 1), other, rtol=0, atol=0, equal_nan=True)


def test_arguments_of_another_shape_are_refused():
    given: Drafts = drafts(2, 3, 0)
    for grow in (draft_tree.grow, reference_trees.grow):
        with pytest.raises(ValueError, match=r"grow: most must be 1 to 3, with at most 64 nodes, got 4"):
            grow(*given, 4)
        with pytest.raises(ValueError, match=r"grow: rule must be float64 \[26\], contiguous"):
            grow(*given._replace(rule=given.rule[1:]), 2)
    tree = reference_trees.grow(*given, 2)
    for follow in (draft_tree.follow, reference_trees.follow):
        with pytest.raises(ValueError, match=r"follow: picks must be int64 \[12\], contiguous"):
            follow(tree, torch.zeros(13, dtype=torch.int64), 4)
    assert len(CONFIDENCE_EDGES) == NUM_BINS - 1
