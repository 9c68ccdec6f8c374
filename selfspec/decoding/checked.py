"""`CheckedPolicy`: a policy whose plans are checked before they are run, and which rows may opt out of."""

from __future__ import annotations

from collections import abc
from dataclasses import replace

from selfspec.control.plan import NUM_LOOKUP_BINS, LookupTable, Policy
from selfspec.core import UNBOUNDED_ROUNDS, Plan, RoundOutput, Sequence
from selfspec.decoding.checks import check_lookups, check_plan

MOST_CHECKED = 4  # checked plans that are remembered
PLAIN = Plan(None, (), num_rounds=UNBOUNDED_ROUNDS)


class CheckedPolicy:
    """Asks a policy for plans, refuses what rows cannot follow, and drafts nothing for rows that opted out."""

    def __init__(self, policy: Policy, num_layers: int) -> None:
        self.policy, self._num_layers = policy, num_layers
        self._table: tuple[LookupTable | None, int] = None, 0  # the last one that was checked, and its rows
        self._checked: list[tuple[Plan, int, Plan]] = []  # plans, rows, and the plans as they are run; the last first
        self._is_planned = True  # the last plan by the policy

    def plan(self, rows: list[Sequence]) -> Plan:
        """The plan of a program of these rows.

        Raises:
            ValueError: the rows cannot follow it.
        """
        speculate = [row.request.params.speculative for row in rows]
        self._is_planned = any(speculate)
        if not self._is_planned:
            return check_plan(PLAIN, len(rows), self._num_layers)
        asked = self.policy.plan(rows)
        plan = next((fit for one, count, fit in self._checked if one is asked and count == len(rows)), None)
        if plan is None:
            plan = check_plan(asked, len(rows), self._num_layers)
            self._checked = [(asked, len(rows), plan), *self._checked[: MOST_CHECKED - 1]]
        if plan.lookups is not None and (plan.lookups is not self._table[0] or len(rows) != self._table[1]):
            check_lookups(plan.lookups, len(rows))
            self._table = plan.lookups, len(rows)
        return plan if all(speculate) else _without(plan, speculate)

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        """Tell the policy what came of its last plan; of rounds that it did not plan it is told nothing."""
        if self._is_planned and rounds:
            self.policy.observe(plan, rounds)


def _without(plan: Plan, speculate: abc.Sequence[bool]) -> Plan:
    """The plan without drafts and shadow picks for rows that do not speculate."""
    none, table, shadow = (0,) * NUM_LOOKUP_BINS, plan.lookups, plan.shadow
    lengths = tuple([n if may else 0 for n, may in zip(plan.draft_lengths, speculate, strict=True)])
    if table is not None:
        own = tuple([row if may else none for row, may in zip(table.lengths, speculate, strict=True)])
        table = table._replace(lengths=own)
    if shadow is not None:
        rows = tuple([i for i in shadow.rows if speculate[i]])
        shadow = shadow._replace(rows=rows) if rows else None
    return replace(plan, draft_lengths=lengths, lookups=table, shadow=shadow)
