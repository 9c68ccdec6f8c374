"""Second choices: beside which tokens of a draft they are worth drafting, and how often they are right."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.plan import SecondChoices, confidence_bin

FIRST, FIRST_WEIGHT = 0.5, 6.0  # how often one is right that nothing is known of, and observations that is worth
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
    """How often a layer's second choice is right where its first is wrong, shrunk to that of all layers."""

    def __init__(self, num_layers: int) -> None:
        self._right, self._seen = [0.0] * num_layers, [0.0] * num_layers  # index 0: of all layers
        self._weight = 1.0  # of an observation now; later ones weigh more instead of earlier ones less

    def pass_time(self, tokens: float) -> None:
        """Let older observations fade by `tokens` emitted tokens per row."""
        self._weight *= 2 ** (tokens / HALF_LIFE)
        if self._weight > 1e9:
            self._right = [count / self._weight for count in self._right]
            self._seen = [count / self._weight for count in self._seen]
            self._weight = 1.0

    def add(self, layer: int, is_right: bool) -> None:
        for line in (0, layer):
            self._right[line] += self._weight * is_right
            self._seen[line] += self._weight

    def of(self, layer: int) -> float:
        first = FIRST_WEIGHT * self._weight
        pooled = (self._right[0] + first * FIRST) / (self._seen[0] + first)
        return (self._right[layer] + first * pooled) / (self._seen[layer] + first)
