"""`Timetable`: when `Adaptive` decides anew, and which plain rounds it need not be asked about."""

from __future__ import annotations

import math

# Rounds between decisions; once layers begin to draft, where earlier texts told nothing of them and where they did; and
# for how many rounds that is.
REPLAN, EARLY_REPLAN, EARLY = 24, (6, 12), 24
# Later each holds for twice as many rounds as the one before, up to so many, as far as decisions would take more than
# this share of the time: each takes so many seconds of the interpreter, with the call that it ends.
RAREST, DECIDING_SHARE, DECIDING = 96, 0.005, 1e-3
# The same where next to nothing is known of the layer that drafts: more of models so fast that a decision would take
# more than this share of that time.
FIRST_REPLAN, MOST_FIRST, FIRST_SHARE = 2, 6, 0.5
EARLY_DECIDING_SHARE = 0.014  # the same of decisions that come early, each after twice as many rounds as the one before
# Rounds after a decision to which the next is put off for rounds that say nothing of layers, of one row and of several.
MOST_PUT_OFF = (12, 48)
IDLE_ROUNDS = 512  # the same while nothing is drafted
CLOCK_EVERY, SELDOM, SETTLED = 32, 128, 128  # and between looks at the clock then; and after so many such rounds
AHEAD = 15  # plain rounds that nobody need ask about after one that found nothing better, and looks nothing up


class Timetable:
    """Counts rounds.

    Args:
        has_prior: whether earlier texts have told of the layers already.

    Attributes:
        round: how many have begun.
        ahead: rounds after this one that are plain, and that nobody need ask about.
    """

    def __init__(self, has_prior: bool = False) -> None:
        self._has_prior, self._early_replan = has_prior, EARLY_REPLAN[has_prior]
        self.round = self.ahead = 0
        self._plain_since = 0  # the round after which none drafted
        self._next = self._last = 0  # the rounds of the next decision, and of the last one
        self._began = 0  # since when layers draft
        self._held = 0  # for how many rounds the decision before the last one did

    def tell_prior(self) -> None:
        """Earlier texts have told of the layers."""
        self._has_prior, self._early_replan = True, EARLY_REPLAN[True]

    @property
    def is_due(self) -> bool:
        """Whether this round decides."""
        return self.round >= self._next

    @property
    def until_due(self) -> int:
        """Rounds after this one that come before the next that decides."""
        return max(0, self._next - self.round - 1)

    @property
    def is_early(self) -> bool:
        """Whether these are the first rounds of all."""
        return self.round < EARLY

    @property
    def has_clock(self) -> bool:
        """Whether the clock is looked at in this round even if it is plain."""
        return self.round % self._clock_every == 0

    @property
    def _clock_every(self) -> int:
        return CLOCK_EVERY if self.round < self._plain_since + SETTLED else SELDOM

    def note_draft(self) -> None:
        """This round drafts."""
        self._plain_since = self.round

    def begin(self) -> None:
        """A round that somebody asks about."""
        self.round += 1
        self.ahead = 0

    def look_ahead(self, most: int) -> None:
        """The next rounds are plain, at most so many, up to the next decision or look at the clock."""
        every = self._clock_every
        until_clock = every - 1 - self.round % every
        self.ahead = max(0, min(most, until_clock, self._next - self.round - 1))

    def pass_ahead(self, num_rounds: int) -> None:
        """So many of those came; what comes next is asked about."""
        self.round += num_rounds
        self.ahead = 0

    def decide_now(self) -> None:
        """There is something to decide upon in the round that comes."""
        self._next = self.round

    def decide_after(self, num_rounds: int) -> None:
        if self.round > self._last:
            self._held = self.round - self._last
        self._last, self._next = self.round, self.round + num_rounds

    def put_off(self, num_rows: int) -> None:
        """This round says nothing of layers: the next decision may come one later."""
        if self._next > self.round:
            self._next += min(1, self.may_put_off(num_rows))

    def may_put_off(self, num_rows: int) -> int:
        """For how many such rounds to come."""
        return max(0, self._last + MOST_PUT_OFF[num_rows > 1] - self._next)

    def decide_while_drafting(self, num_rows: int, begins: bool, is_known: bool, seconds: float) -> None:
        """Layers draft, and begin to or not; something is known of the one that does, or next to nothing.

        Args:
            seconds: of a round.
        """
        if begins:
            self._began = self.round
        rarer = 1 if num_rows == 1 else 2  # where something is decided, it is for all rows
        usual, paid = REPLAN * rarer, _rounds_to_pay(DECIDING_SHARE, seconds)
        is_early = self.round < self._began + EARLY
        early = self._early_replan * rarer
        if self._has_prior:
            early = max(early, min(EARLY, paid))
        elif not begins:
            early = max(early, min(2 * self._held, EARLY, _rounds_to_pay(EARLY_DECIDING_SHARE, seconds)))
        known = early if is_early else max(usual, min(2 * self._held, RAREST, paid))
        first = min(MOST_FIRST, max(FIRST_REPLAN, _rounds_to_pay(FIRST_SHARE, seconds)))
        self.decide_after(known if is_known else first * rarer)


def _rounds_to_pay(share: float, seconds: float) -> int:
    """Rounds of so many seconds each, of which a decision takes no more than a share."""
    return math.ceil(DECIDING / (share * seconds)) if seconds > 0 else 0
