"""`Looks`: when, at which rows and at how many layers shadow picks are made, within a share of the time."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.costs import Costs
from selfspec.control.plan import Seconds, ShadowPlan
from selfspec.control.timetable import DECIDING

# Of the time, for shadow picks: of one row and of several, at first and later; and while nothing is drafted.
SHADOW_SHARE, BATCH_SHARE, OFF_SHARE = (0.006, 0.003), (0.006, 0.003), 0.006
SHADOW_COLUMNS = 20  # judged positions looked at per row
SHADOW_ROWS = 4  # most rows looked at in a round
# Rounds of a small model come many in a call, which goes on past no look: those wait for a multiple of so many rounds,
# if these pass in so little time, and take so many seconds beside; where nothing is drafted somebody decides anew.
STEP, SOON, CALLING = 8, 8e-3, 3e-4
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
        self._step = 1  # rounds
        self._round, self._due = 0, -1  # rounds that passed; and after how many the next look is due, if it is paid for
        self._turn = 0  # whose turn it is to be looked at in a large batch

    @property
    def are_due(self) -> bool:
        """Whether earlier rounds have paid for one, and those that were likely to pass before it have passed."""
        return self._credit >= 0 and self._round >= self._due

    @property
    def rounds_left(self) -> int:
        """Rounds to come before one is due, if they are like the last; many if it is, for there was nothing to see."""
        if self.are_due:
            return NOTHING_TO_SEE
        due = self._due
        if self._credit < 0:
            if self._paid <= 0:
                return 0
            due = self._due_after(self._round + int(-self._credit / self._paid) + 1)
        return due - self._round - 1

    def pass_idle(self, seconds: float, num_rounds: int = 1) -> None:
        """Lay by a share of what the forwards of plain rounds took, which could be many."""
        self._pass(OFF_SHARE, seconds, 0.0, num_rounds)

    def pass_round(self, num_rows: int | None, is_early: bool, seconds: Seconds) -> None:
        """Lay a share of the round's time by, and take out what looking took.

        Args:
            num_rows: that drafted; None: none did.
        """
        share = OFF_SHARE
        if num_rows is not None:
            share = (SHADOW_SHARE if num_rows == 1 else BATCH_SHARE)[not is_early]
        beside = DECIDING if num_rows is None else CALLING * (self._step - 1) / (STEP - 1)
        looked = max(0.0, seconds.shadow) + beside if seconds.shadow > 0 else 0.0
        self._pass(share, seconds.draft + seconds.verify + seconds.head, looked, 1)

    def _pass(self, share: float, seconds: float, looked: float, num_rounds: int) -> None:
        """Rounds took so many seconds, and looking beside them."""
        paid, was_paid = share * max(0.0, seconds), self._credit >= 0
        self._paid, self._round = paid / max(1, num_rounds), self._round + num_rounds
        most = max(self._most, CALLING)
        self._credit = max(min(self._credit + paid - looked, most), -10 * most)  # a hiccup is forgiven
        if seconds > 0:
            self._step = max(1, min(STEP, int(SOON * num_rounds / seconds)))
        if self._credit >= 0 and not was_paid:
            self._due = self._due_after(self._round)

    def _due_after(self, num_rounds: int) -> int:
        """After how many rounds a look is due that is paid for after so many."""
        return -(-num_rounds // self._step) * self._step

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
