"""`Looks`: when, at which rows and at how many layers shadow picks are made, within a share of the time."""

from __future__ import annotations

import math
from typing import Any

from selfspec.control.costs import Costs
from selfspec.control.laps import Seconds
from selfspec.control.plan import ShadowPlan
from selfspec.control.timetable import DECIDING

# Of the time, for shadow picks: of one row and of several, at first and later; and while nothing is drafted.
SHADOW_SHARE, BATCH_SHARE, OFF_SHARE = (0.006, 0.003), (0.006, 0.003), 0.006
SHADOW_COLUMNS = 20  # judged positions looked at per row
SHADOW_ROWS = 4  # most rows looked at in a round
# Rounds of a small model come many in a call, which goes on past no look: those come so many rounds apart at least, if
# these pass in so little time, and take so many seconds beside, of two calls that begin on cold caches.
STEP, SOON, CALLING = 8, 8e-3, 1.5e-3
SHORT = 0.25  # of a look's price may be unpaid when its round comes: that was foreseen, and ended a call
FARTHEST = 512  # rounds ahead that a look is fixed for
FOLLOW = 0.1  # how fast what rounds take is followed
NOTHING_TO_SEE = 64  # rounds
PUT_OFF = 12  # rounds for which a look is put off where lookup drafts
# Rows with no more tokens to come than this end before a look could be worth it: it waits for others, so many rounds.
LAST, WAITS = 16, 64
OWED = (0.1, 1.0)  # largest looks earned before the first: where nothing is known, and where there is a prior
# Of the time that rows will take: where a first look takes more it waits, until it takes no more than this of that time
# and all in which it waited, in earlier texts, too.
EARLY_SHARE, WAITED_SHARE = 0.04, 0.02


class Looks:
    """An account in seconds, which a share of the decoded time is paid into, and shadow picks are paid from.

    Args:
        has_prior: whether earlier texts have told of the layers already.
        waited: of an earlier one, see below.

    Attributes:
        waited: seconds that were decoded since anybody looked, nothing being known.
    """

    def __init__(self, costs: Costs, has_prior: bool, waited: float = 0.0) -> None:
        self._costs = costs
        self._most = costs.shadow(costs.num_layers - 1, SHADOW_COLUMNS)
        self._credit = -OWED[has_prior] * self._most  # seconds that shadow picks may still take
        self._has_begun, self.waited = has_prior, waited  # the former: see `begin`
        self.are_awaited = False
        """Whether nothing is known, and finding out takes more than is likely to come of it for now."""
        self._paid = self._took = 0.0  # by a round lately, and its seconds
        self._short = 0.0  # seconds that may be short of the next look's price
        self._round, self._due = 0, 0  # rounds that passed, and after how many the next look comes
        self._turn = 0  # whose turn it is to be looked at in a large batch
        self._room = math.inf  # tokens to come of the row that goes on longest

    def begin(self, seconds: float, of_round: float) -> None:
        """Rows will take so many seconds, and a plain round `of_round`, by the table: when the first look may come.

        Of whom nothing is known as yet: where a look and a decision are much beside that, it waits until it is earned,
        or until rows come that take longer.
        """
        if not self._has_begun or self.are_awaited:
            self._await(seconds)
        if not self._took:
            self._took, self._paid = of_round, OFF_SHARE * of_round
            self._due = self._rounds_to_pay()

    def _await(self, seconds: float) -> None:
        first = DECIDING + self._costs.shadow(self._costs.num_layers - 1, 1)
        awaited = first > max(EARLY_SHARE * seconds, WAITED_SHARE * (self.waited + seconds))
        if awaited and not self.are_awaited:
            self._credit = min(self._credit, -first)
        elif self.are_awaited and not awaited:
            self._credit = max(self._credit, -OWED[False] * self._most)
            self._due = self._round + self._rounds_to_pay()
        self._has_begun, self.are_awaited = True, awaited

    def take_seed(self, seconds: float) -> None:
        """A prompt was looked at, which took so long: what comes of that is known before rounds begin."""
        if not self._has_begun:
            self._credit -= seconds  # the first look would have told as much; those of later prompts come beside
        self._has_begun, self.are_awaited, self.waited = True, False, 0.0

    @property
    def are_due(self) -> bool:
        """Whether earlier rounds have paid for one, and as many have passed as were likely to."""
        return self._credit >= -self._short and self._round >= self._due and not self._waits(0)

    @property
    def rounds_left(self) -> int:
        """Rounds to come for certain before one is due; many if it is, for there was nothing to see."""
        if self.are_due:
            return NOTHING_TO_SEE
        left = max(0, self._due - self._round - 1)
        return self._due + WAITS - self._round - 1 if self._waits(left) else left

    def put_off(self) -> None:
        """The round that begins is none to look in, and the next ones are likely not to be either."""
        self._due = max(self._due, self._round + PUT_OFF)

    def tell_room(self, room: float) -> None:
        """So many tokens are to come of the row that goes on longest."""
        self._room = room

    def _waits(self, num_rounds: int) -> bool:
        """Whether a look that is due after so many rounds is left to later rows."""
        return self._room - num_rounds <= LAST and self._round + num_rounds < self._due + WAITS

    def pay(self, seconds: float) -> None:
        """Something else comes in the place of a look, and takes so long beside what calls and decisions take."""
        self._pass(OFF_SHARE, 0.0, seconds + CALLING + DECIDING, 0)

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
        looked, took = 0.0, seconds.draft + seconds.verify + seconds.head
        if seconds.shadow > 0:
            looked = seconds.shadow + CALLING * (self._step - 1) / (STEP - 1)
            if num_rows is None:  # whatever else it takes more than others, and what it tells is soon decided upon
                looked += DECIDING + min(max(0.0, took - self._took), self._took)
                took = min(took, self._took)
        self._pass(share, took, looked, 1)
        if looked:
            self.are_awaited, self.waited = False, 0.0

    def _pass(self, share: float, seconds: float, looked: float, num_rounds: int) -> None:
        """Rounds took so many seconds, and looking beside them."""
        paid, most = share * max(0.0, seconds), max(self._most, CALLING)
        if self.are_awaited and seconds > 0:
            self.waited += seconds
        self._credit = max(min(self._credit + paid - looked, most), -10 * most)  # a hiccup is forgiven
        self._round += num_rounds
        if seconds > 0 and num_rounds:
            rate = FOLLOW if self._round > num_rounds else 1.0  # what the table said is forgotten at once
            self._took += rate * (seconds / num_rounds - self._took)
            self._paid += rate * (paid / num_rounds - self._paid)
        if looked or (self._credit < -self._short and self._round >= self._due):
            self._due = self._round + self._rounds_to_pay()

    @property
    def _step(self) -> int:
        return max(1, min(STEP, int(SOON / self._took))) if self._took > 0 else 1

    def _rounds_to_pay(self) -> int:
        """After so many rounds the next look is paid for."""
        needed, paid = -self._credit, FARTHEST * self._paid
        self._short = max(0.0, SHORT * needed)
        rounds = FARTHEST if needed > paid else math.ceil(needed / self._paid) if needed > 0 else 0
        return max(rounds, self._step - 1)

    def plan(self, layers: tuple[int, ...], num_rows: int, emitted: int) -> ShadowPlan | None:
        """At these layers, at a few rows in turn, of about `emitted` tokens each."""
        if not layers:
            return None
        count, most = 1, min(num_rows, SHADOW_ROWS)
        while count < most and self._costs.shadow(len(layers), (count + 1) * emitted) < self._credit:
            count += 1
        chosen = tuple(sorted((self._turn + i) % num_rows for i in range(count)))
        self._turn = (self._turn + count) % num_rows
        return ShadowPlan(layers, chosen, 1 if emitted == 1 else SHADOW_COLUMNS)


def waited_of(prior: Any) -> float:
    """What `Looks.waited` was when a state was kept; 0 where it is not told, or nonsense."""
    waited = prior.get("waited") if isinstance(prior, dict) else None
    if not isinstance(waited, int | float) or isinstance(waited, bool):
        return 0.0
    return float(waited) if 0 <= waited < math.inf else 0.0
