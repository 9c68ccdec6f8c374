"""`Looks`: when, at which rows and at how many layers shadow picks are made, within a share of the time."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.costs import Costs
from selfspec.control.plan import Seconds, ShadowPlan

# Of the time, for shadow picks: of one row and of several, at first and later; and while nothing is drafted.
SHADOW_SHARE, BATCH_SHARE, OFF_SHARE = (0.006, 0.003), (0.006, 0.003), 0.006
SHADOW_COLUMNS = 20  # judged positions looked at per row
SHADOW_ROWS = 4  # most rows looked at in a round
DECIDING = 5e-4  # seconds of the interpreter that every look takes beside, where it makes somebody decide anew
NOTHING_TO_SEE = 64  # rounds
OWED = (0.1, 1.0)  # largest looks earned before the first: where nothing is known, and where there is a prior


class Looks:
    """An account in seconds, which a share of the decoded time is paid into, and shadow picks are paid from.

    Args:
        has_prior: whether earlier texts have told of the layers already.
    """

    def __init__(self, costs: Costs, has_prior: bool) -> None:
        self._costs = costs
        self._most = costs.shadow(costs.num_layers - 1, SHADOW_COLUMNS)
        self._credit = -OWED[has_prior] * self._most  # seconds that shadow picks may still take
        self._paid = 0.0  # by the last round
        self._turn = 0  # whose turn it is to be looked at in a large batch

    @property
    def are_due(self) -> bool:
        """Whether earlier rounds have paid for one."""
        return self._credit >= 0

    @property
    def rounds_left(self) -> int:
        """Rounds to come before earlier ones have paid for one, if they are like the last; many if they have already,
        for then there was nothing to look at."""
        if self._credit >= 0:
            return NOTHING_TO_SEE
        return int(-self._credit / self._paid) if self._paid > 0 else 0

    def pass_idle(self, seconds: float, num_rounds: int = 1) -> None:
        """Lay by a share of what the forwards of plain rounds took, which could be many."""
        paid = OFF_SHARE * max(0.0, seconds)
        self._paid = paid / max(1, num_rounds)
        self._credit += paid

    def pass_round(self, num_rows: int | None, is_early: bool, seconds: Seconds) -> None:
        """Lay a share of the round's time by, and take out what looking took; and deciding, if nothing is drafted.

        Args:
            num_rows: that drafted; None: none did.
        """
        share = OFF_SHARE
        if num_rows is None and seconds.shadow > 0:
            self._credit -= DECIDING
        if num_rows is not None:
            share = (SHADOW_SHARE if num_rows == 1 else BATCH_SHARE)[not is_early]
        self._paid = share * max(0.0, seconds.draft + seconds.verify + seconds.head)
        self._credit += self._paid - max(0.0, seconds.shadow)
        self._credit = max(min(self._credit, self._most), -10 * self._most)  # a hiccup is forgiven

    def plan(self, layers: Sequence[int], exit_layer: int | None, num_rows: int, emitted: int) -> ShadowPlan | None:
        """At these layers but the one that drafts, at a few rows in turn, of about `emitted` tokens each."""
        layers = tuple([layer for layer in layers if layer != exit_layer])
        if not layers:
            return None
        count, most = 1, min(num_rows, SHADOW_ROWS)
        while count < most and self._costs.shadow(len(layers), (count + 1) * emitted) < self._credit:
            count += 1
        chosen = tuple(sorted((self._turn + i) % num_rows for i in range(count)))
        self._turn = (self._turn + count) % num_rows
        return ShadowPlan(layers, chosen, 1 if exit_layer is None else SHADOW_COLUMNS)
