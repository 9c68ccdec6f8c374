"""`RankZeroPolicy`: a policy whose decisions are rank 0's on every rank of a tensor-parallel model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from selfspec.control.plan import Plan, Policy
from selfspec.control.rows import RoundOutcome, RowState, Shadow


class RankZeroPolicy(Policy):
    """Asks its policy on the leading rank only, and hands what that says to the others.

    Clocks, saved statistics and processors differ between ranks; were each to plan for itself, one would draft where
    another does not, and both would wait for ever.

    Args:
        inner: the policy; where this rank does not lead, nothing is asked of it.
        agreed: gives rank 0's value on every rank.
    """

    def __init__(self, inner: Policy, leads: bool, agreed: Callable[[Any], Any]) -> None:
        self.inner, self._leads, self._agreed = inner, leads, agreed

    def plan(self, rows: Sequence[RowState]) -> Plan:
        return self._led(lambda: self.inner.plan(rows))

    def observe(self, plan: Plan, rounds: Sequence[RoundOutcome]) -> None:
        if self._leads:
            self.inner.observe(plan, rounds)

    def seed_layers(self, row: RowState) -> Sequence[int]:
        return self._led(lambda: tuple(self.inner.seed_layers(row)))

    def seed(self, row: RowState, shadow: Shadow) -> None:
        if self._leads:
            self.inner.seed(row, shadow)

    def _led(self, decide: Callable[[], Any]) -> Any:
        """What the leading rank decides; what it raises is raised on every rank, which would else wait for ever."""
        decision: Any = None
        problem: Exception | None = None
        if self._leads:
            try:
                decision = decide()
            except Exception as raised:
                problem = raised
        told, failed = self._agreed((decision, None if problem is None else f"{type(problem).__name__}: {problem}"))
        if problem is not None:
            raise problem
        if failed is not None:
            raise RuntimeError(f"the policy failed on rank 0: {failed}")
        return told
