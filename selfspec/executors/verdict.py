"""`Verdict`: what verification decided for one row, chain or tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from selfspec.control.rows import RowOutcome, Shadow
from selfspec.executors.logprobs import TokenLogprobs
from selfspec.executors.rows import Row
from selfspec.model.kv_cache import Tree


class Verdict(NamedTuple):
    """What verification decided for one row. Node 0 of a draft is the row's last token, known before."""

    drafted: list[int]
    path: Sequence[int]  # the nodes accepted, node 0 first
    block: list[int]  # the accepted drafts and the target's own next token, before any cut
    logits: Tensor | None  # [len(block), vocab] when the row keeps them
    scores: Tensor | None
    tree: Tree | None = None
    chain: int = 0  # drafted tokens that follow one another, from the first on; others are drafted beside them
    confidences: tuple[float, ...] = ()  # of the drafted tokens
    divergences: tuple[float, ...] = ()  # at the judged drafted tokens
    shadow: Shadow | None = None
    match: int = 0  # of a draft by lookup: tokens of the match that it follows
    source: int = 0  # of that draft: one of `control.plan.SOURCES`
    logprobs: list[TokenLogprobs] | None = None  # of the block, where the row asks for them

    @property
    def accepted(self) -> int:
        return len(self.path) - 1

    @property
    def num_right(self) -> int:
        """Accepted tokens of the chain."""
        if self.tree is None:
            return len(self.path) - 1
        return next((i - 1 for i, node in enumerate(self.path) if node != i), self.accepted)

    def branch(self) -> list[int]:
        """The drafted tokens on the branch that the output followed, and on from where it left: first children."""
        if self.tree is None:
            return self.drafted
        nodes, parents = list(self.path), self.tree.parents
        for node in range(nodes[-1] + 1, len(parents)):
            if parents[node] == nodes[-1]:
                nodes.append(node)
        return [self.drafted[node - 1] for node in nodes[1:]]

    def outcome(self, request_id: int, num_kept: int, is_left_out: bool = False) -> RowOutcome:
        """What the policy is told, of a row that kept `num_kept` of its drafted tokens.

        Args:
            is_left_out: whether its draft was refused for a token that it could not pick.
        """
        length = self.chain if self.tree is not None else len(self.drafted)
        right = min(self.num_right, num_kept)
        drafted = right if num_kept < self.accepted else length  # beyond the row's end nothing was judged
        return RowOutcome(
            request_id,
            drafted,
            right,
            self.confidences[:drafted],
            self.divergences[:drafted],
            self.shadow,
            self._second(right) if right < drafted else None,
            0 if self.tree is None else len(self.drafted) - length,
            is_left_out and right < drafted,  # else its row ended before it
            self.match,
            self.source,
        )

    def _second(self, right: int) -> bool | None:
        """Whether what was drafted beside the chain's first wrong token was accepted; None where nothing was."""
        if self.tree is None or right not in self.tree.parents[self.chain + 1 :]:
            return None
        return self.accepted > right


def walk(tree: Tree, guesses: Sequence[int], picks: Sequence[int]) -> list[int]:
    """From node 0 on to the child that equals the target's pick, as far as there is one: the nodes on the way.

    Args:
        guesses: the tokens of nodes 1, 2, ...
        picks: the target's, at every node.
    """
    children: dict[tuple[int, int], int] = {}
    for node in range(len(guesses), 0, -1):  # of equal children the first
        children[tree.parents[node], guesses[node - 1]] = node
    path = [0]
    while (child := children.get((path[-1], picks[path[-1]]))) is not None:
        path.append(child)
    return path


def drawable(row: Row, path: Sequence[int], drawn: Sequence[int]) -> Sequence[int]:
    """The path as far as sampling can draw a token at its nodes; the row may end before it comes to the next one.

    Args:
        drawn: per node, 0 where it cannot.

    Raises:
        ValueError: not even at the first, as `generate` raises then; it is the row's own fault.
    """
    if drawn[path[0]]:
        return path[: next((i for i, node in enumerate(path) if not drawn[node]), len(path))]
    with row.blamed():
        raise ValueError(
            f"no token can be sampled at position {len(row.content)}, where all logits are -inf or one of them is no "
            "number; let logits_processor and no_repeat_ngram_size leave a token"
        )
