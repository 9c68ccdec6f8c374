"""`CostGrid`: what every round of one row takes that a bound may be made of, in arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from selfspec.control.costs import CONTEXT, Costs
from selfspec.control.plan import LOOKUP
from selfspec.control.round_costs import deepest_copy


class CostGrid:
    """Seconds of a round of one row by exit layer, drafted tokens and context, in arrays."""

    def __init__(self, costs: Costs, longest: int) -> None:
        layers = costs.num_layers
        self.plain = costs.plain_round(1)
        self.per_context = layers * costs.reading(1, CONTEXT + 1)  # plain
        self.base = np.array([[costs.round(e, [d]) for d in range(longest + 1)] for e in range(1, layers)])
        # Seconds per cached token that a layer takes longer in a pass of one token, and for every further one.
        one = costs.reading(1, CONTEXT + 1)
        further = costs.reading(1, CONTEXT + 1, 2) - one
        exits, drafted = np.arange(1, layers)[:, None], np.arange(longest + 1)
        verified = one + further * drafted
        self.slope = one * (drafted + 1) * exits + (layers - exits) * verified
        self.copied_slope = one * drafted * exits + layers * verified
        self.lookup_slope = layers * verified
        self.half = deepest_copy(layers) if costs.copies is not None else 0  # copies are of no more layers than these
        # By whether one token is drafted beside the others. The last token is not fed to copies, and all layers verify.
        self.copied, self.copied_second = (
            np.array(
                [
                    [costs.round(e, [d], CONTEXT, beside, copies=True) for d in range(longest + 1)]
                    for e in range(1, self.half + 1)
                ]
            )
            for beside in ([], [1])
        )
        self.by_lookup = np.array([costs.round(LOOKUP, [d]) for d in range(longest + 1)])
        self.with_second = np.array(
            [[costs.round(e, [d], CONTEXT, [1]) for d in range(longest + 1)] for e in range(1, layers)]
        )
        self.second_slope = self.slope + layers * further  # of the last pass, and of verification
        self.copied_second_slope = self.copied_slope + layers * further

    def plain_at(self, context: float) -> float:
        return float(self.plain + self.per_context * max(0.0, context - CONTEXT))

    def at(self, context: float) -> NDArray[np.float64]:
        """`[L - 1 + half, longest + 1]`: seconds of rounds at this many cached tokens, by layers and then by copies."""
        beyond = max(0.0, context - CONTEXT)
        return self._with_copies(self.base + self.slope * beyond, self.copied, self.copied_slope * beyond)

    def of(self, exit_layer: int, copies: bool) -> tuple[list[float], list[float]]:
        """Seconds of rounds by drafted tokens at `CONTEXT` cached tokens, and how they grow with each more."""
        base, slope = (self.copied, self.copied_slope) if copies else (self.base, self.slope)
        return base[exit_layer - 1].tolist(), slope[exit_layer - 1].tolist()

    def with_second_at(self, context: float) -> NDArray[np.float64]:
        """`[L - 1 + half, longest + 1]`: the same with one token drafted beside the others."""
        beyond = max(0.0, context - CONTEXT)
        rounds = self.with_second + self.second_slope * beyond
        return self._with_copies(rounds, self.copied_second, self.copied_second_slope * beyond)

    def _with_copies(
        self, rounds: NDArray[np.float64], copied: NDArray[np.float64], beyond: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        return np.concatenate((rounds, copied + beyond[: self.half])) if self.half else rounds

    def by_lookup_at(self, context: float) -> NDArray[np.float64]:
        """`[longest + 1]`: seconds of rounds that draft by lookup."""
        return self.by_lookup + self.lookup_slope * max(0.0, context - CONTEXT)
