"""`Seeding`: at which layers the last positions of a prompt are looked at, where nothing is known of them yet."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.costs import Costs
from selfspec.control.decider import Decider
from selfspec.control.decision import HANDICAP, spread
from selfspec.control.experience import Experience
from selfspec.control.plan import SEED_POSITIONS
from selfspec.control.rows import RowState

SHARE = 0.01  # of the time, for looks at a prompt's last positions
SEEN = 6  # lasting picks of a likely exit, with which no prompt is looked at: earlier texts have told
# Of those that are read together so many are looked at: what one alone tells is off by a tenth. Rounds tell the rest
# soon enough, and of what the model writes.
PROMPTS = 4


class Seeding:
    """Asked of every prompt while it is read.

    Args:
        exit_layers: those to choose from; empty, too, where earlier texts have told of them.
    """

    def __init__(self, costs: Costs, experience: Experience, decider: Decider, exit_layers: Sequence[int]) -> None:
        self._costs, self._experience, self._decider = costs, experience, decider
        self._can_tell = bool(exit_layers)
        self._joining = 0  # prompts read since the last round
        self._first_to_see = 0  # the likeliest exit when a prompt was to be looked at last; 0: none was

    def begin_round(self) -> None:
        self._joining = 0

    def forget(self) -> None:
        """Others may be likely now."""
        self._first_to_see = 0

    def layers(self, row: RowState, num_rows: int) -> tuple[int, ...]:
        """As many as the row's output can pay for, spread over the depth, likely exits first.

        Args:
            num_rows: that are decoded beside it.
        """
        self._joining += 1
        if not self._can_tell or self._joining > PROMPTS or num_rows > 1:
            return ()
        if self._first_to_see and self._experience.num_counted(self._first_to_see) >= SEEN:
            return ()  # to ask what could pay takes as long as half a decision
        positions = min(SEED_POSITIONS, row.content_length - 1)
        budget = SHARE * row.room * self._costs.plain_round(1)
        if self._costs.seed(1, positions) > budget:
            return ()
        could = self._decider.could_pay(self._decider.worth_of(max(1, num_rows), row.content_length), HANDICAP)
        order = [layer for layer in spread(self._costs.num_layers) if layer in could]
        self._first_to_see = order[0] if order else 0
        if order and self._experience.tracker.num_lasting(order[0]) >= SEEN:
            return ()
        count = len(order)
        while count and self._costs.seed(count, positions) > budget:
            count -= 1
        return tuple(sorted(order[:count]))
