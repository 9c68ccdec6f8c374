"""`Asking`: when an engine asks its policy, what it is told, and which plans it may not make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from selfspec.control.laps import Seconds
from selfspec.control.plan import LOOKUP, Lookups, Plan, Policy, Steady
from selfspec.control.rows import RowOutcome, RowState
from selfspec.decoding.checks import check_lookups, check_plan, check_room, check_steady
from selfspec.errors import whole

NOT_STEADY = Steady()
NEVER = NOT_STEADY.most_surprises
MOST_CHECKED = 4  # plans: that of most rounds, and a few of rows that are nearly done


class Asked(Protocol):
    """A row that is ready to decode."""

    request_id: int

    @property
    def room(self) -> int: ...
    @property
    def match(self) -> int: ...
    @property
    def guessed(self) -> Sequence[int]: ...
    def told(self, reads_lookup: bool) -> RowState: ...


class Asking:
    """Asks a policy for a plan, every round or, where it sees plain rounds ahead, once for all of them.

    Between two rounds the weights of a model stream through the processor's caches, so that to ask and to tell takes
    as long as a good part of a small model's token; nothing that drafts only once in a while could afford it.

    Attributes:
        reads_lookup: whether the policy is told what lookup finds this round; the same of `reads_ranks`.
        minds_lookup: whether it was when it was asked last.
        hears_lookup: whether it is told what lookups would have come to, too.
        lookups: by which it is asked in rounds ahead of a batch, where these have its rows draft; None: by others.
    """

    def __init__(self, policy: Policy, num_layers: int) -> None:
        self.policy, self._num_layers = policy, num_layers
        self.reads_lookup = self.hears_lookup = self.reads_ranks = self.minds_lookup = False
        self._checked: list[tuple[Plan, int]] = []  # plans that were fit, for so many rows; checked last, the first
        self._plan: Plan | None = None  # that holds
        self._rows: list[int] = []  # by request
        self._room: Sequence[int] = ()  # of the rows that were asked about last
        self._ahead = self._left = 0  # rounds that it goes on for, unasked: of all, and still to come
        self._seconds = 0.0  # of forwards in those that came
        self._steady = NOT_STEADY  # what the policy said when it saw them
        self._asked_from: tuple[int, ...] = ()  # by match, longer ones as the last: whether it is asked after all
        self.lookups: Lookups | None = None
        self._fit: tuple[Lookups | None, int] = None, 0  # the last table that was fit for so many rows
        self._most_surprises = NEVER  # and after how many of these

    @property
    def watched(self) -> Steady:
        """By what rows are watched in the rounds that it goes on for unasked."""
        return self._steady

    def steady(self, plan: Plan) -> Steady:
        """How many rounds after the one of this plan, the last one, are likely to be planned in the same way.

        Raises:
            ValueError: what the policy says of it is nothing of the kind.
        """
        if self._ahead:
            told, came = self._steady, self._ahead - self._left
            num_rounds, kept = max(self._left, told.num_rounds - came), max(0, told.kept - came)
            return told._replace(num_rounds=num_rounds, kept=kept)
        steady: Steady = getattr(self.policy, "steady", NOT_STEADY)
        self._check_steady(steady)
        if plan.exit_layer == LOOKUP and steady.usual is not None:
            self._check(steady.usual, self._room)
        return steady

    def plan(self, rows: Sequence[Asked], is_quiet: bool = False) -> tuple[Plan, bool]:
        """The plan of a round of these rows, and whether the policy is to be told what came of it.

        Args:
            is_quiet: whether it is known already that the rows' matches change nothing in a round ahead.

        Raises:
            ValueError: the rows cannot follow the plan, or the policy's `plain_ahead` is no count.
        """
        known = [row.request_id for row in rows] == self._rows
        if self._left and self._plan is not None and known and (is_quiet or not self._is_wanted(rows)):
            self._left -= 1
            self.reads_lookup = self.hears_lookup = self.reads_ranks = False
            return self._plan, False
        self.tell()
        policy = self.policy
        self.reads_lookup = getattr(policy, "reads_lookup", False)
        self.reads_ranks = getattr(policy, "reads_ranks", False)
        reads_lookup = self.minds_lookup = self.reads_lookup
        plan = policy.plan([row.told(reads_lookup) for row in rows])
        self.hears_lookup = getattr(policy, "hears_lookup", reads_lookup)
        self._room = [row.room for row in rows]
        self._check(plan, self._room)
        ahead = getattr(policy, "plain_ahead", 0)
        if ahead and plan.exit_layer is None and plan.shadow is None:  # no other plan may be followed twice
            whole("a policy's plain_ahead", ahead, 0)
            self._watch()
            self._plan, self._rows = plan, [row.request_id for row in rows]
            self._ahead = self._left = ahead
        return plan, True

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome], seconds: Seconds) -> None:
        """Tell what came of a round that the policy was asked about."""
        self.policy.observe(plan, outcomes, seconds)

    def pass_plain(self, seconds: Seconds) -> None:
        """Count a round that it was not asked about."""
        self._seconds += seconds.verify + seconds.head

    def _watch(self) -> None:
        """In the rounds ahead, rows are watched for matches after which their plan would be another one."""
        steady = getattr(self.policy, "steady", NOT_STEADY)
        self._check_steady(steady)
        branches = steady.branches or (False,) * len(steady.lengths)
        wanted = [-1 if n or may else 0 for n, may in zip(steady.lengths, branches, strict=True)]
        self._asked_from = tuple(wanted) if self.minds_lookup and any(wanted) else ()
        self.lookups = steady.lookups if self.minds_lookup else None
        self._most_surprises = steady.most_surprises if self.minds_lookup else NEVER
        # Where matches alone say what is drafted, rounds may be decoded so before anybody is asked.
        self._steady = steady if self.minds_lookup else Steady(steady.num_rounds)

    def _is_wanted(self, rows: Sequence[Asked]) -> bool:
        """Whether the policy is asked though it saw rounds ahead."""
        asked, most = self._asked_from, self._most_surprises
        if most < NEVER and len(rows) == 1 and self._ahead - self._left >= self._steady.kept:
            guessed = rows[0].guessed
            if sum(guessed) >= most and self._steady.surprises(guessed) >= most:
                return True
        if self.lookups is not None and len(rows) > 1:
            return self.lookups.drafted([row.match for row in rows], [row.room - 1 for row in rows]) is not None
        return bool(asked) and any(asked[min(row.match, len(asked) - 1)] for row in rows)

    def tell(self) -> None:
        """Tell the policy how many of the rounds ahead came, if there were any to come."""
        ahead, left, seconds = self._ahead, self._left, self._seconds
        self._ahead = self._left = 0
        self._seconds = 0.0
        if ahead > left:
            self.policy.pass_plain(ahead - left, seconds)  # type: ignore[attr-defined]  # whoever sees any ahead has it

    def _check_steady(self, steady: Steady) -> None:
        check_steady(steady)
        lookups, num_rows = steady.lookups, len(self._room)
        if lookups is not None and (lookups is not self._fit[0] or num_rows != self._fit[1]):
            check_lookups(lookups, num_rows)
            self._fit = lookups, num_rows

    def _check(self, plan: Plan, room: Sequence[int]) -> None:
        for fit, num_rows in self._checked:
            if plan is fit and len(room) == num_rows:
                break  # many rounds have the same
        else:
            check_plan(plan, len(room), self._num_layers)
            self._checked = [(plan, len(room)), *self._checked[: MOST_CHECKED - 1]]
        check_room(plan, room)
