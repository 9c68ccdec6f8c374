"""`Schedule`: when to decide again, when to probe layers, and when to decode plainly to compare the clock."""

from __future__ import annotations

import math

from selfspec.control.costs import Costs
from selfspec.control.plan import ShadowPlan

# Rounds until something is decided again: with a layer that is not known yet; else at first, then twice as many.
UNKNOWN, FIRST, MOST_ROUNDS = 4, 16, 64
DECIDING, DECIDING_SHARE = 1e-3, 0.03  # seconds that a decision takes, and its share of the time
PROBE_SHARE = 0.006  # of the time, for probing layers
OWED = (0.1, 1.0)  # full probes to be earned before the first: where nothing is known, and where there is a prior
FORGIVEN = 10.0  # full probes that may be owed at most
COLUMNS, ROWS = 20, 4  # judged positions probed per row, and most rows probed in a round
FOLLOW = 0.1  # how fast the seconds of a round are followed
BLOCK, BLOCK_SHARE, LEAST_APART = 4, 0.005, 192  # plain rounds of a comparison; its share; rounds between two


class Schedule:
    """Counts rounds, and keeps an account of seconds: a share of the time is paid in, probes are paid from it.

    Args:
        has_prior: whether earlier texts have told of the layers already.
    """

    def __init__(self, costs: Costs, has_prior: bool) -> None:
        self._costs = costs
        self._full = costs.shadow(costs.num_layers - 1, COLUMNS)
        self._credit = -OWED[has_prior] * self._full
        self._until, self._interval = 0, FIRST
        self._turn = 0  # whose turn it is to be probed in a large batch
        self._took = 0.0  # seconds of a round lately
        self._probe_in, self._price = 0, 0.0  # rounds before the next probe; seconds of the last one by the table
        self.block = 0  # plain rounds that are left of a comparison

    def decide_now(self) -> None:
        """In the next round."""
        self._until = 0

    @property
    def is_due(self) -> bool:
        """Whether something is to be decided now."""
        return self._until <= 0 and not self.block

    def decided(self, round_seconds: float, are_others: bool, is_known: bool) -> None:
        """Something was decided.

        Args:
            round_seconds: of the rounds that follow.
            are_others: whether it was decided for other rows before.
            is_known: whether the layer that drafts is, if one does.
        """
        self._interval = FIRST if are_others else min(2 * self._interval, MOST_ROUNDS)
        rounds = self._interval if is_known else UNKNOWN
        self._until = max(rounds, math.ceil(DECIDING / (DECIDING_SHARE * round_seconds)))
        self._took = self._took or round_seconds
        self._fix_probe()

    def compare(self) -> None:
        """Decode the next rounds plainly."""
        self.block = BLOCK

    def rounds_apart(self, speedup: float) -> float:
        """Rounds that draft between two comparisons, for these to take no more than their share."""
        return max(LEAST_APART, BLOCK * (speedup - 1) / BLOCK_SHARE)

    @property
    def probe_is_due(self) -> bool:
        if self._probe_in > 0 or self.block:
            return False
        if self._credit < 0:
            self._fix_probe()
        return self._credit >= 0

    def _fix_probe(self) -> None:
        """In how many rounds the next probe comes: then it will be paid for, if rounds take as long as lately."""
        paid = PROBE_SHARE * self._took
        self._probe_in = max(1, math.ceil(-self._credit / paid)) if self._credit < 0 < paid else max(0, self._probe_in)

    @property
    def num_rounds(self) -> int:
        """Rounds before anything is decided."""
        return max(1, self._until)

    @property
    def rounds_before_probe(self) -> int:
        """Rounds before layers are probed, if it comes to that."""
        return max(1, self._probe_in)

    def probe(self, layers: tuple[int, ...], num_rows: int, emitted: float) -> ShadowPlan | None:
        """At these layers, at a few rows in turn, of about `emitted` tokens each; None where nothing is to be seen."""
        if not layers:
            self._credit = -self._full
            self._fix_probe()
            return None
        count, most, each = 1, min(num_rows, ROWS), math.ceil(emitted)
        while count < most and self._costs.shadow(len(layers), (count + 1) * each) < self._credit:
            count += 1
        self._price = self._costs.shadow(len(layers), count * each)
        rows = tuple(sorted((self._turn + i) % num_rows for i in range(count)))
        self._turn = (self._turn + count) % num_rows
        return ShadowPlan(layers, rows, 1 if emitted <= 1 else COLUMNS)

    def pay(self, seconds: float) -> None:
        """A probe took so long."""
        self._credit = max(self._credit - seconds, -FORGIVEN * self._full)

    def pass_round(self, forwards: float, probing: float | None) -> None:
        """A round took so many seconds for its forwards, and for probing layers, if it did."""
        if self.block:
            self.block -= 1
        else:
            self._until -= 1
            self._probe_in -= 1
        self._took += (FOLLOW if self._took else 1.0) * (max(0.0, forwards) - self._took)
        self._credit = min(self._credit + PROBE_SHARE * max(0.0, forwards), self._full)
        if probing is not None:
            self.pay(max(probing, self._price) + DECIDING)
            self._until = min(self._until, 0)  # what it tells is decided upon
            self._fix_probe()
