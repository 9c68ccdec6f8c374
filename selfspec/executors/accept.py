"""The acceptance rule: a drafted token is kept exactly when it equals the target's own pick."""

from __future__ import annotations

from collections import abc

from selfspec.core import Sequence
from selfspec.model.kv_cache import Tree


def accept(drafted: abc.Sequence[int], picks: abc.Sequence[int]) -> int:
    """How many drafted tokens are kept: those before the first that is not the target's pick.

    Draft and target pick with the same noise, so this holds at every temperature, and the output is plain decoding's.
    `kernels/cpu/round.cpp` and `kernels/fused_accept.py` have the same rule for rounds that run outside Python.

    Args:
        drafted: n tokens.
        picks: the target's, at the n drafted positions and after the last.
    """
    return next((i for i, (token, pick) in enumerate(zip(drafted, picks, strict=False)) if token != pick), len(drafted))


def accept_tree(tree: Tree, drafted: abc.Sequence[int], picks: abc.Sequence[int]) -> list[int]:
    """The same for a draft with branches: the accepted nodes, from node 0, the sequence's last token, on.

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
