"""Second choices: beside which tokens of a draft they are worth drafting, and how often they are right."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from selfspec.control.plan import CONFIDENCE_EDGES, SecondChoices, confidence_bin

BOUNDS = (0.35, 0.6)  # between confidences of first choices that are told apart
FIRST, FIRST_WEIGHT = (0.2, 0.35, 0.5), 8.0  # how often one is right that nothing is known of, and what that weighs
_GROUPS = [bisect_right(BOUNDS, edge) for edge in (0.0, *CONFIDENCE_EDGES)]  # of every confidence bin
HALF_LIFE = 200.0  # tokens after which an observation counts half


def likely_seconds(rule: SecondChoices, confidences: Sequence[float], most: int) -> list[int]:
    """Beside which tokens of a draft, counted from 0, to draft the second choice: at most so many, the likeliest."""
    offers, survival = [], 1.0
    for at, confidence in enumerate(confidences):
        column = confidence_bin(confidence)
        offers.append((survival * (1 - rule.right[column]) * rule.second[column], -at))
        survival *= rule.right[column]
    offers.sort(reverse=True)
    found = [(chance, -at) for chance, at in offers[: max(0, most)] if chance > rule.least]
    if sum(chance - rule.least for chance, _ in found) <= rule.enough:
        return []
    return sorted(at for _, at in found)


class SecondRates:
    """How often a layer's second choice is right where its first is wrong, by how sure that was.

    What is seen of a layer is shrunk to what is seen of all of them. Where the first choice is sure, nothing but the
    second may be left; where it is not, there are many others.
    """

    def __init__(self, num_layers: int) -> None:
        shape = range(num_layers)  # index 0: of all layers
        self._right, self._seen = ([[0.0] * len(FIRST) for _ in shape] for _ in range(2))
        self._weight = 1.0  # of an observation now; later ones weigh more instead of earlier ones less

    def pass_time(self, tokens: float) -> None:
        """Let older observations fade by `tokens` emitted tokens per row."""
        self._weight *= 2 ** (tokens / HALF_LIFE)
        if self._weight > 1e9:
            for counts in (*self._right, *self._seen):
                counts[:] = [count / self._weight for count in counts]
            self._weight = 1.0

    def add(self, layer: int, confidence: float, is_right: bool) -> None:
        """Count one, beside a first choice of this confidence."""
        at = bisect_right(BOUNDS, confidence)
        for line in (0, layer):
            self._right[line][at] += self._weight * is_right
            self._seen[line][at] += self._weight

    def of(self, layer: int) -> tuple[float, ...]:
        """By confidence bin of the first choice."""
        weight = FIRST_WEIGHT * self._weight
        rates = []
        for at, first in enumerate(FIRST):
            pooled = (self._right[0][at] + weight * first) / (self._seen[0][at] + weight)
            rates.append((self._right[layer][at] + weight * pooled) / (self._seen[layer][at] + weight))
        return tuple(rates[group] for group in _GROUPS)
