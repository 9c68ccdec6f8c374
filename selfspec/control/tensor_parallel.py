"""`RankZeroPolicy`: a policy that makes the decisions of rank 0 on every rank of a tensor-parallel model."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from typing import Any

from selfspec.control.plan import Policy
from selfspec.core import Plan, RoundOutput, Sequence, ShadowPicks


class RankZeroPolicy(Policy):
    """Calls its policy on rank 0 only, and broadcasts the results.

    Measured times and saved statistics differ between ranks. With different plans the ranks would deadlock.

    Args:
        inner: the policy; it is called on rank 0 only.
        leads: whether this is rank 0.
        agreed: returns rank 0's value on every rank.
    """

    def __init__(self, inner: Policy, leads: bool, agreed: Callable[[Any], Any]) -> None:
        self.inner, self._leads, self._agreed = inner, leads, agreed
        self.most_forced = inner.most_forced

    def plan(self, rows: list[Sequence]) -> Plan:
        return self._from_rank_zero(lambda: self.inner.plan(rows))

    def likely(self, num_rows: int) -> list[Plan]:
        return self._from_rank_zero(lambda: self.inner.likely(num_rows))

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        if self._leads:
            self.inner.observe(plan, rounds)

    def seed_layers(self, row: Sequence) -> abc.Sequence[int]:
        return self._from_rank_zero(lambda: tuple(self.inner.seed_layers(row)))

    def seed(self, row: Sequence, shadow: ShadowPicks) -> None:
        if self._leads:
            self.inner.seed(row, shadow)

    def set_waiting(self, num_waiting: int, num_joining: int = 0) -> None:
        self.inner.set_waiting(num_waiting, num_joining)

    def _from_rank_zero(self, decide: Callable[[], Any]) -> Any:
        """The result of `decide` on rank 0. An exception there is raised on every rank, which would otherwise block."""
        decision: Any = None
        problem: Exception | None = None
        if self._leads:
            try:
                decision = decide()
            except Exception as raised:
                problem = raised
        shared, failed = self._agreed((decision, None if problem is None else f"{type(problem).__name__}: {problem}"))
        if problem is not None:
            raise problem
        if failed is not None:
            raise RuntimeError(f"the policy failed on rank 0: {failed}")
        return shared
