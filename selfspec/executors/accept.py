"""The acceptance rule for drafts with branches, and for picks that sampling cannot make."""

from __future__ import annotations

from collections import abc

from selfspec.core import Sequence
from selfspec.model.kv_cache import Tree


def accept_tree(tree: Tree, drafted: abc.Sequence[int], picks: abc.Sequence[int]) -> list[int]:
    """`kernels.pick.num_accepted` for a draft with branches: the accepted nodes, from the last known token (0) on.

    Args:
        drafted: the tokens of nodes 1, 2, ...
        picks: the target's, at every node.
    """
    children: dict[tuple[int, int], int] = {}
    for node in range(len(drafted), 0, -1):  # of equal children the first
        children[tree.parents[node], drafted[node - 1]] = node
    path = [0]
    while (child := children.get((path[-1], picks[path[-1]]))) is not None:
        path.append(child)
    return path


def truncate_unsampleable(
    sequence: Sequence, path: abc.Sequence[int], can_sample: abc.Sequence[int]
) -> abc.Sequence[int]:
    """The accepted nodes before the first at which no token can be sampled; the sequence may end before that one.

    Args:
        can_sample: per node, 0 where all logits are -inf or one is NaN.

    Raises:
        ValueError: not even at the first node, as `generate` raises then; it is the sequence's own fault.
    """
    if can_sample[path[0]]:
        return path[: next((i for i, node in enumerate(path) if not can_sample[node]), len(path))]
    with sequence.blame():
        raise ValueError(
            f"no token can be sampled at position {sequence.num_tokens}, where all logits are -inf or one of them is "
            "no number; let logits_processors and no_repeat_ngram_size leave a token"
        )
