"""Trees grown from a row's free guesses: a chain, and beside its tokens what else may come, the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from selfspec.control.fading import Fading, Passed
from selfspec.control.plan import TokenTree
from selfspec.control.rows import Guesses

NUM_RANKS = 8  # candidates told apart by their rank
NUM_KINDS = 3  # and by where they come from: after a token, after a pair, after a shorter match
# By kind and rank: how often one is right that nothing is known of.
FIRST = ((0.12, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01), *[(0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.02, 0.02)] * 2)
FIRST_WEIGHT = 8.0  # observations that is worth
HALF_LIFE = 300.0  # tokens after which an observation counts half
LEAST = 0.04  # nodes less likely than this to be come to, and right, are not grown
MOST_NODES = 32  # beside the chain


class Ranks(Fading):
    """How often the candidate of each rank is right, by kind, where there is no chain and where the chain is wrong."""

    def __init__(self, passed: Passed | None = None) -> None:
        super().__init__(HALF_LIFE, passed)
        self._hits = [[0.0] * NUM_RANKS for _ in range(2 * NUM_KINDS)]
        self._seen = [0.0] * (2 * NUM_KINDS)
        self._rates: list[list[float]] | None = None
        self._likeliest = 0.0, 0.0  # see `likeliest`
        self._beside = 0.0  # see `beside`

    def _divide(self, by: float) -> None:
        self._hits = [[count / by for count in line] for line in self._hits]
        self._seen = [count / by for count in self._seen]

    def add(self, ranks: Sequence[tuple[int, bool, int]]) -> None:
        """Count (kind, whether a chain was wrong there, the rank of what came) of every token."""
        self._fade()
        for kind, is_beside, rank in ranks:
            line = 2 * kind + is_beside
            self._seen[line] += self._weight
            if rank < NUM_RANKS:
                self._hits[line][rank] += self._weight
        self._rates = None

    @property
    def rates(self) -> list[list[float]]:
        """By rank, falling: for every kind, without a chain, and beside a wrong one."""
        if self._rates is None:
            self._fade()
            first = FIRST_WEIGHT * self._weight
            self._rates = []
            for line, (hits, seen) in enumerate(zip(self._hits, self._seen, strict=True)):
                prior = FIRST[line // 2]
                rates = [(hit + first * p) / (seen + first) for hit, p in zip(hits, prior, strict=True)]
                self._rates.append([*accumulate(rates, min)])
            lines = self._rates[::2]
            self._likeliest = max([line[0] for line in lines]), max([sum(line) for line in lines])
            self._beside = max([line[0] for line in self._rates[1::2]])
        return self._rates

    def likeliest(self, is_tree: bool) -> float:
        """How often a candidate is right where there is no chain, at most: the likeliest, or any of a tree's."""
        if self._rates is None:
            _ = self.rates
        return self._likeliest[is_tree]

    @property
    def beside(self) -> float:
        """How often a candidate is right where the chain is wrong, at most."""
        if self._rates is None:
            _ = self.rates
        return self._beside


class Grown(NamedTuple):
    """A tree, and of each node how likely it is come to, and right; nodes before it in this order are likelier."""

    tree: TokenTree
    chances: list[float]
    order: list[int]  # nodes, the likeliest first, counted from 0; any first of them are a tree

    def best(self, count: int) -> TokenTree:
        """The likeliest nodes, in the tree's order."""
        kept = sorted(self.order[:count])
        at = {node + 1: i + 1 for i, node in enumerate(kept)} | {0: 0}
        tokens, parents = self.tree
        return TokenTree(tuple(tokens[n] for n in kept), tuple(at[parents[n]] for n in kept))


def grow(
    guesses: Guesses,
    chances: Sequence[float],
    rates: Sequence[Sequence[float]],
    is_tree: bool = True,
    least: float = LEAST,
) -> Grown:
    """A chain whose tokens have these chances, and beside it the candidates that are likelier than `least`.

    Args:
        chances: of the chain to be right as far as each token, falling.
        rates: see `Ranks`.
        is_tree: whether there may be branches; else the chain goes on with the likeliest candidates.
    """
    tokens = list(guesses.chain(len(chances))) if chances else []
    chance = list(chances[: len(tokens)])
    parents = list(range(len(tokens)))
    heap: list[tuple[float, int, int, int, int]] = []  # (-chance, count, parent, its token, candidate)
    recalls = guesses.recalls  # else the next token alone has candidates
    highest = max(line[0] for line in rates)

    def offer(node: int, previous: int, token: int, left: float, taken: int | None) -> None:
        if left * highest < least or (not is_tree and taken is not None):
            return
        kind, found = guesses.candidates(token, previous) if node else guesses.first_candidates()
        if taken in found:
            found.remove(taken)
        line = rates[2 * kind + (taken is not None)]
        for candidate, rate in zip(found, line if is_tree else line[:1], strict=False):
            if left * rate < least:
                break
            heappush(heap, (-left * rate, len(heap), node, token, candidate))

    previous, token = guesses.last
    before = 1.0
    for node, (after, chained) in enumerate(zip([*chance, 0.0], [*tokens, None], strict=True)):
        if before < least:
            break
        offer(node, previous, token, before - after if is_tree else before, chained)
        if not recalls:
            break
        if chained is not None:
            before, previous, token = after, token, chained
    most = len(tokens) + MOST_NODES
    while heap and len(tokens) < most:
        negative, _, parent, before_it, candidate = heappop(heap)
        tokens.append(candidate)
        parents.append(parent)
        chance.append(-negative)
        if recalls:
            offer(len(tokens), before_it, candidate, -negative, None)
    order = sorted(range(len(chance)), key=chance.__getitem__, reverse=True)
    return Grown(TokenTree(tuple(tokens), tuple(parents)), chance, order)
