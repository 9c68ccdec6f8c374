"""`Schedule`: when to decide again, when to probe layers, and when to run plain rounds as a reference for timing."""

from __future__ import annotations

import math

from selfspec.control.costs import Costs
from selfspec.control.plan import ShadowPlan

# Rounds between decisions: for a layer without enough observations; else at first, doubling up to the maximum.
UNKNOWN, FIRST, MOST_ROUNDS = 4, 16, 64
DECISION_SECONDS, DECISION_SHARE = 1e-3, 0.03  # seconds of a decision, and the largest share of the time for decisions
PROBE_SHARE = 0.006  # share of the time for probing layers
INITIAL_DEBT = (0.1, 1.0)  # initial budget for probes, in negative full probes: without and with a prior
MAX_DEBT = 10.0  # lower limit of the budget, in negative full probes
COLUMNS, ROWS = 20, 4  # probed positions per row, and rows per probe, at most
SMOOTHING = 0.1  # of the moving average of the seconds per round
# Plain rounds of a timing reference; its share of the time; and the fewest rounds between two.
BLOCK, BLOCK_SHARE, MIN_INTERVAL = 4, 0.005, 192


class Schedule:
    """Counts rounds, and keeps a time budget for probes, which grows by a share of the time.

    Args:
        has_prior: whether there are acceptance statistics of earlier texts.
    """

    def __init__(self, costs: Costs, has_prior: bool) -> None:
        self._costs = costs
        self._full_probe = costs.shadow(costs.num_layers - 1, COLUMNS)
        self._budget = -INITIAL_DEBT[has_prior] * self._full_probe
        self._rounds_left, self._interval = 0, FIRST
        self._next_row = 0  # the first row of the next probe
        self._round_seconds = 0.0  # moving average
        self._probe_in = 0  # rounds before the next probe
        self._expected_probe = 0.0  # predicted seconds of the last probe
        self.block = 0
        """Remaining plain rounds of a timing reference."""

    def decide_now(self) -> None:
        """Make a decision due in the next round."""
        self._rounds_left = 0

    @property
    def is_due(self) -> bool:
        """Whether a decision is due."""
        return self._rounds_left <= 0 and not self.block

    def decided(self, round_seconds: float, is_other: bool, is_known: bool) -> None:
        """Plan the next decision after one was made.

        Args:
            round_seconds: expected seconds of the next rounds.
            is_other: whether the batch has other rows than at the decision before.
            is_known: whether the exit layer has enough observations.
        """
        self._interval = FIRST if is_other else min(2 * self._interval, MOST_ROUNDS)
        rounds = self._interval if is_known else UNKNOWN
        self._rounds_left = max(rounds, math.ceil(DECISION_SECONDS / (DECISION_SHARE * round_seconds)))
        self._round_seconds = self._round_seconds or round_seconds
        self._plan_probe()

    def compare(self) -> None:
        """Make the next `BLOCK` rounds plain."""
        self.block = BLOCK

    def rounds_apart(self, speedup: float) -> float:
        """Rounds between two timing references, so that these take at most `BLOCK_SHARE` of the time."""
        return max(MIN_INTERVAL, BLOCK * (speedup - 1) / BLOCK_SHARE)

    @property
    def probe_is_due(self) -> bool:
        """Whether the budget allows a probe now."""
        if self._probe_in > 0 or self.block:
            return False
        if self._budget < 0:
            self._plan_probe()
        return self._budget >= 0

    def _plan_probe(self) -> None:
        """Set the number of rounds until the budget is expected to allow a probe."""
        paid = PROBE_SHARE * self._round_seconds
        self._probe_in = max(1, math.ceil(-self._budget / paid)) if self._budget < 0 < paid else max(0, self._probe_in)

    @property
    def num_rounds(self) -> int:
        """Rounds until the next decision."""
        return max(1, self._rounds_left)

    @property
    def rounds_before_probe(self) -> int:
        """Rounds until the next probe."""
        return max(1, self._probe_in)

    def probe(self, layers: tuple[int, ...], num_rows: int, emitted: float) -> ShadowPlan | None:
        """The next probe, of these layers at a few rows in turn; None without layers. `emitted`: tokens per row."""
        if not layers:
            self._budget = -self._full_probe
            self._plan_probe()
            return None
        count, most, each = 1, min(num_rows, ROWS), math.ceil(emitted)
        while count < most and self._costs.shadow(len(layers), (count + 1) * each) < self._budget:
            count += 1
        self._expected_probe = self._costs.shadow(len(layers), count * each)
        rows = tuple(sorted((self._next_row + i) % num_rows for i in range(count)))
        self._next_row = (self._next_row + count) % num_rows
        return ShadowPlan(layers, rows, 1 if emitted <= 1 else COLUMNS)

    def pay(self, seconds: float) -> None:
        """Subtract the seconds of a probe from the budget."""
        self._budget = max(self._budget - seconds, -MAX_DEBT * self._full_probe)

    def pass_round(self, forwards: float, probing: float | None) -> None:
        """Count a round, with the seconds of its forwards and of its probe, if it had one."""
        if self.block:
            self.block -= 1
        else:
            self._rounds_left -= 1
            self._probe_in -= 1
        self._round_seconds += (SMOOTHING if self._round_seconds else 1.0) * (max(0.0, forwards) - self._round_seconds)
        self._budget = min(self._budget + PROBE_SHARE * max(0.0, forwards), self._full_probe)
        if probing is not None:
            self.pay(max(probing, self._expected_probe) + DECISION_SECONDS)
            self._rounds_left = min(self._rounds_left, 0)  # decide with the new statistics
            self._plan_probe()
