"""Trees grown from a row's free guesses: a chain, and alternatives beside its first token, the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from selfspec.control.fading import Fading, Passed
from selfspec.control.plan import TokenTree
from selfspec.control.rows import Guesses

# By rank among the tokens that followed shorter matches: how often one is right, of those that nothing is known of.
FIRST = (0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.02, 0.02)
NUM_RANKS = len(FIRST)
FIRST_WEIGHT = 8.0  # observations that is worth
HALF_LIFE = 300.0  # tokens after which an observation counts half
LEAST = 0.04  # nodes less likely than this to be come to, and right, are not grown


class Ranks(Fading):
    """How often the token of each rank is right, where the chain's first one is wrong."""

    def __init__(self, passed: Passed | None = None) -> None:
        super().__init__(HALF_LIFE, passed)
        self._hits, self._seen = [0.0] * NUM_RANKS, 0.0
        self._rates: list[float] | None = None

    def _divide(self, by: float) -> None:
        self._hits, self._seen = [count / by for count in self._hits], self._seen / by

    def add(self, rank: int) -> None:
        """Count the rank of the token that came, counted from 0; where it had none, their number."""
        self._fade()
        self._seen += self._weight
        if rank < NUM_RANKS:
            self._hits[rank] += self._weight
        self._rates = None

    @property
    def rates(self) -> list[float]:
        """`[NUM_RANKS]`, falling."""
        if self._rates is None:
            self._fade()
            first = FIRST_WEIGHT * self._weight
            rates = [(hit + first * p) / (self._seen + first) for hit, p in zip(self._hits, FIRST, strict=True)]
            self._rates = [*accumulate(rates, min)]
        return self._rates


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


def grow(guesses: Guesses, chances: Sequence[float], rates: Sequence[float], least: float = LEAST) -> Grown:
    """A chain whose tokens have these chances, and alternatives to its first one that are likelier than `least`.

    Args:
        chances: of the chain to be right as far as each token, falling.
        rates: see `Ranks`.
    """
    tokens = list(guesses.chain(len(chances))) if chances else []
    chance, parents = list(chances[: len(tokens)]), list(range(len(tokens)))
    others = [token for token in guesses.alternatives() if token != tokens[0]] if tokens else []
    for token, rate in zip(others, rates, strict=False):
        likely = (1 - chance[0]) * rate
        if likely < least:
            break
        tokens.append(token)
        parents.append(0)
        chance.append(likely)
    order = sorted(range(len(chance)), key=chance.__getitem__, reverse=True)
    return Grown(TokenTree(tuple(tokens), tuple(parents)), chance, order)
