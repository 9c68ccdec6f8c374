"""`Asking`: when an engine asks its policy, what it is told, and which plans it may not make."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.plan import Plan, Policy, RowOutcome, Seconds
from selfspec.decoding.checks import check_plan, check_room
from selfspec.decoding.row import Row


class Asking:
    """Asks a policy for a plan, every round or, where it sees plain rounds ahead, once for all of them.

    Between two rounds the weights of a model stream through the processor's caches, so that to ask and to tell takes
    as long as a good part of a small model's token; nothing that drafts only once in a while could afford it.

    Attributes:
        reads_lookup: whether the policy is told what lookup finds this round; the same of `reads_ranks`, `recycles`.
    """

    def __init__(self, policy: Policy, num_layers: int) -> None:
        self.policy, self._num_layers = policy, num_layers
        self.reads_lookup = self.reads_ranks = self.recycles = False
        self._checked: tuple[Plan | None, int] = None, 0  # the last plan that was fit for so many rows
        self._plan: Plan | None = None  # that holds
        self._rows: list[Row] = []  # of it
        self._left = 0  # rounds that it goes on for, unasked
        self._untold, self._untold_seconds = 0, 0.0  # such rounds that the policy knows nothing of, and their forwards

    def plan(self, rows: list[Row]) -> tuple[Plan, bool]:
        """The plan of a round of these rows, and whether the policy is to be told what came of it."""
        if self._left and self._plan is not None and rows == self._rows:
            self._left -= 1
            self.reads_lookup = self.reads_ranks = self.recycles = False
            return self._plan, False
        self._tell()
        policy = self.policy
        self.reads_lookup = getattr(policy, "reads_lookup", False)
        self.reads_ranks = getattr(policy, "reads_ranks", False)
        self.recycles = getattr(policy, "recycles", False)
        reads_lookup = self.reads_lookup
        plan = policy.plan([row.told(reads_lookup) for row in rows])
        self._check(plan, [row.room for row in rows])
        self._plan, self._rows, self._left = plan, rows, getattr(policy, "plain_ahead", 0)
        return plan, True

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: Seconds) -> None:
        """Tell what came of a round that the policy was asked about."""
        self.policy.observe(plan, outcomes, seconds)

    def pass_plain(self, seconds: Seconds) -> None:
        """Count a round that it was not asked about."""
        self._untold += 1
        self._untold_seconds += seconds.verify

    def _tell(self) -> None:
        if self._untold:
            self.policy.pass_plain(self._untold, self._untold_seconds)  # type: ignore[attr-defined]
            self._untold, self._untold_seconds = 0, 0.0

    def _check(self, plan: Plan, room: Sequence[int]) -> None:
        if plan is not self._checked[0] or len(room) != self._checked[1]:  # many rounds have the same one
            check_plan(plan, len(room), self._num_layers)
            self._checked = plan, len(room)
        check_room(plan, room)
