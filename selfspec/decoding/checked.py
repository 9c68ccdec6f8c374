"""`CheckedPolicy`: a policy whose plans are checked before they are run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from selfspec.control.plan import LookupTable, Plan, Policy
from selfspec.control.rows import RowState
from selfspec.decoding.checks import check_lookups, check_plan

MOST_CHECKED = 4  # plans that are known to be fit


class Planned(Protocol):
    """A row that is ready to decode."""

    @property
    def state(self) -> RowState: ...


class CheckedPolicy:
    """Asks a policy, and refuses what rows cannot follow."""

    def __init__(self, policy: Policy, num_layers: int) -> None:
        self.policy, self._num_layers = policy, num_layers
        self._table: tuple[LookupTable | None, int] = None, 0  # that was fit last
        self._checked: list[tuple[Plan, int, Plan]] = []  # plans, rows, and the plans as they are run; the last first

    def plan(self, rows: Sequence[Planned]) -> Plan:
        """The plan of a program of these rows.

        Raises:
            ValueError: the rows cannot follow it.
        """
        asked = self.policy.plan([row.state for row in rows])
        plan = next((fit for one, count, fit in self._checked if one is asked and count == len(rows)), None)
        if plan is None:
            plan = check_plan(asked, len(rows), self._num_layers)
            self._checked = [(asked, len(rows), plan), *self._checked[: MOST_CHECKED - 1]]
        if plan.lookups is not None and (plan.lookups is not self._table[0] or len(rows) != self._table[1]):
            check_lookups(plan.lookups, len(rows))
            self._table = plan.lookups, len(rows)
        return plan
