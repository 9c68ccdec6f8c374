"""`CheckedPolicy`: a policy whose plans are checked before they are run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from selfspec.control.plan import LOOKUP, Lookups, Plan, Policy, Steady
from selfspec.control.rows import RowState
from selfspec.decoding.checks import check_lookups, check_plan, check_room, check_steady

MOST_CHECKED = 4  # plans: that of most rounds, and a few of rows that are nearly done


class Planned(Protocol):
    """A row that is ready to decode."""

    @property
    def room(self) -> int: ...
    def told(self, reads_lookup: bool) -> RowState: ...


class CheckedPolicy:
    """Asks a policy, and refuses what rows cannot follow.

    Attributes:
        reads_lookup: whether the policy was told what lookup finds when it planned last.
    """

    def __init__(self, policy: Policy, num_layers: int) -> None:
        self.policy, self._num_layers = policy, num_layers
        self.reads_lookup = False
        self._checked: list[tuple[Plan, int]] = []  # plans that were fit, for so many rows; checked last, the first
        self._fit: tuple[Lookups | None, int] = None, 0  # the last table that was fit for so many rows
        self._room: Sequence[int] = ()

    def plan(self, rows: Sequence[Planned]) -> Plan:
        """The plan of a round of these rows.

        Raises:
            ValueError: the rows cannot follow it.
        """
        self.reads_lookup = self.policy.reads_lookup
        plan = self.policy.plan([row.told(self.reads_lookup) for row in rows])
        self._room = [row.room for row in rows]
        self._check(plan, self._room)
        return plan

    def steady(self, plan: Plan) -> Steady:
        """How many rounds after the one of this plan, the last one, are likely to be planned in the same way.

        Raises:
            ValueError: what the policy says of it is nothing of the kind.
        """
        steady = self.policy.steady
        check_steady(steady)
        lookups, num_rows = steady.lookups, len(self._room)
        if lookups is not None and (lookups is not self._fit[0] or num_rows != self._fit[1]):
            check_lookups(lookups, num_rows)
            self._fit = lookups, num_rows
        if plan.exit_layer == LOOKUP and steady.usual is not None:
            self._check(steady.usual, self._room)
        return steady

    def _check(self, plan: Plan, room: Sequence[int]) -> None:
        for fit, num_rows in self._checked:
            if plan is fit and len(room) == num_rows:
                break  # many rounds have the same
        else:
            check_plan(plan, len(room), self._num_layers)
            self._checked = [(plan, len(room)), *self._checked[: MOST_CHECKED - 1]]
        check_room(plan, room)
