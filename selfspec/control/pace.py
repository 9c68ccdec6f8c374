"""`Pace`: what the clock says of rounds, and of their stages, beside the table of costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

from selfspec.control.costs import Costs
from selfspec.control.kinds import BY_LAYERS, BY_LOOKUP, PLAIN, Kinds
from selfspec.control.laps import Seconds
from selfspec.control.plan import LOOKUP

PICK_STEP, MOST_PICK = 0.34, 200.0  # how fast the price of picks follows the clock, and how far
PASS_STEP, MOST_PASS = 0.1, 2.0  # the same of early passes, up and down
# And of deciding, by so many rounds, since those that begin a call take many times as long; the most, in plain rounds.
DECIDING_STEP, DECIDING_ROUNDS, MOST_DECIDING = 0.5, 64, 1.0
# Of what a plain round spends around its forwards, in the table: a call for every single round spends three to four
# times as much. More is the caller's own stops, criteria and texts, which plain rounds' tokens have as well.
MOST_AROUND, MOST_SPENT = 3.0, 12.0  # the latter: of a few rounds, one of which may have begun a call
FAR, HELD = 3.0, 48  # times the median, beyond which a round of a batch took a decision; rounds that one is for
UNLEARN_EVERY = 1024  # rounds, see `Pace.begin_again`
KEPT_DECIDING = 0.9  # of it is where a later one starts: where nothing is drafted for that, nothing would unlearn it


class Pace:
    """What picks and deciding cost beside all else of their round, and early passes beside its verification.

    Parts of one round are set against each other: what a round takes when others use the machine says nothing about
    other rounds, unless they were near it, see `Kinds`.

    Attributes:
        pick: how much longer picks take than in the table of costs.
        passes: and early passes, and those of copies, beside the verifications of the same rounds.
        deciding: seconds that deciding takes in a round that drafts, by bit length of the number of rows.
        around: and those spent around its forwards beyond what the table has, since more plain rounds come in a call.
        kinds: how much longer rounds that draft take than plain ones.
    """

    def __init__(self, costs: Costs, prior: Any = None) -> None:
        self._costs, self.kinds = costs, Kinds(costs, prior)
        known = prior if self.kinds.has_prior else {}
        self.pick, self.passes = 1.0, _read_passes(known)
        self.deciding, self.around = _read_seconds(known, "deciding"), _read_seconds(known, "around")
        self._most_deciding: dict[int, float] = {}  # by rows
        self._unlearns_at = UNLEARN_EVERY  # see `begin_again`
        self._has_drafted = False
        # Seconds of deciding, and around forwards, of the rounds that drafted since these were last set right.
        self._spent: list[tuple[float, float]] = []
        self._size = 0  # of these, as in `deciding`
        self._since = HELD  # rounds since a decision was spread over those that it is for
        self._seen: dict[int, int] = dict.fromkeys(self.deciding, DECIDING_ROUNDS)  # rounds, by size

    def deciding_of(self, num_rows: int) -> float:
        """Seconds that deciding takes in a round of so many rows; else of fewer, which drafts soon correct."""
        return _of_rows(self.deciding, num_rows)

    def around_of(self, num_rows: int) -> float:
        """The same of those around its forwards."""
        return _of_rows(self.around, num_rows)

    def begin_again(self) -> None:
        """Texts begin: what deciding took is believed a little less, as by one that starts from `state`, but no oftener
        than every so many rounds: to find out again what drafts come to takes a few rounds, too."""
        if self.kinds.round < self._unlearns_at:
            return
        self._unlearns_at = self.kinds.round + UNLEARN_EVERY
        for known in (self.deciding, self.around):
            for size in known:
                known[size] *= KEPT_DECIDING

    def state(self) -> dict[str, Any]:
        """Plain numbers to start a later one from."""
        spent = {"deciding": self.deciding, "around": self.around}
        by_size = {name: {str(size): seconds for size, seconds in of.items()} for name, of in spent.items()}
        return self.kinds.state() | by_size | {"passes": [round(ratio, 3) for ratio in self.passes]}

    def pass_round(self, decided: float, num_idle: int = 0, around: float | None = None, num_rows: int = 1) -> None:
        """Count the seconds that deciding took in a round, and the rounds before it that nothing was said of.

        Args:
            around: those spent around its forwards, if it drafted.
        """
        if around is not None:
            if num_rows.bit_length() != self._size:
                self._size = num_rows.bit_length()
                self._spent.clear()
            self._spent.append((decided, around))
        self.kinds.pass_rounds(1 + num_idle)

    def look(
        self, exit_layer: int | None, num_rows: int, expected: Mapping[str, float], seconds: Seconds, copies: bool
    ) -> None:
        """Set the clock of a round of `num_rows` rows beside what was expected of its stages, see `Costs.stages`."""
        layers = seconds.draft + seconds.verify + seconds.head
        pace = layers / (expected["draft"] + expected["verify"] + expected["head"])
        self._has_drafted |= exit_layer is not None
        # Of a round that drafts, picks are another share; those of plain rounds are in what is known of their kind.
        tells = exit_layer is not None or not self._has_drafted
        if tells and layers > 0 and seconds.pick > 0 and expected["pick"] > 0:  # not of a clock that was set back
            ratio = min(max(seconds.pick / expected["pick"] / pace, 1.0), MOST_PICK)
            self.pick += PICK_STEP * (ratio - self.pick)
        if layers > 0 and expected["draft"] > 0 and self._spent and num_rows.bit_length() == self._size:
            self._follow_spent(num_rows, expected["rest"], pace)
        if min(seconds.draft, seconds.verify, expected["draft"], expected["verify"]) > 0:
            ratio = seconds.draft / expected["draft"] / (seconds.verify / expected["verify"])
            self.passes[copies] += PASS_STEP * (min(max(ratio, 1 / MOST_PASS), MOST_PASS) - self.passes[copies])
        kind = PLAIN if exit_layer is None else BY_LOOKUP if exit_layer == LOOKUP else BY_LAYERS
        # What other layers would have picked is not in the price, nor is what is spent around the forwards.
        priced = self.passes[copies] * expected["draft"] + expected["verify"] + expected["head"]
        self.kinds.look(kind, num_rows, priced + self.pick * expected["pick"], layers + seconds.pick)

    def _follow_spent(self, num_rows: int, rest: float, pace: float) -> None:
        """Take on what rounds that drafted took beside their forwards: at first their mean, then the later ones more.

        Args:
            rest: seconds around a round's forwards in the table.
            pace: of the last one, against the table.
        """
        count = len(self._spent)
        if num_rows > 1 and count < 2:
            return  # a decision is told from other rounds beside another
        decided, around = (sum(taken) / count / pace for taken in zip(*self._spent, strict=True))
        if num_rows > 1 and self._since >= HELD:
            decided -= self._of_decision([one for one, _ in self._spent]) / pace
        self._since += count
        self._spent.clear()
        most = self._most_deciding.get(num_rows)
        if most is None:
            most = self._most_deciding[num_rows] = MOST_DECIDING * self._costs.plain_round(num_rows)
        seen = self._seen[self._size] = self._seen.get(self._size, 0) + count
        step = min(1.0, max(DECIDING_STEP * count / DECIDING_ROUNDS, count / seen))
        if decided > 0:  # not of a clock that was set back
            before = _of_rows(self.deciding, num_rows)
            self.deciding[self._size] = before + step * (min(decided, most) - before)
        before, beyond = _of_rows(self.around, num_rows), min(around - rest, MOST_SPENT * rest)
        self.around[self._size] = min(max(0.0, before + step * (beyond - before)), MOST_AROUND * rest, most)

    def _of_decision(self, spent: Sequence[float]) -> float:
        """Of the mean of what deciding took in some rounds of a batch, what falls on rounds after them.

        A decision is for `HELD` rounds or so; few rounds, as those of a try, say nothing of how many. What else is dear
        comes again before those have passed, and counts.
        """
        beyond = max(0.0, max(spent) - FAR * median_low(spent))
        if beyond:
            self._since = 0
        return beyond / len(spent) - beyond / max(len(spent), HELD)


def _of_rows(known: Mapping[int, float], num_rows: int) -> float:
    """What is known of so many rows, else of fewer."""
    sizes = [size for size in known if size <= num_rows.bit_length()]
    return known[max(sizes)] if sizes else 0.0


def _read_passes(prior: Any) -> list[float]:
    """What `Pace.state` told of early passes; 1 where that is something else."""
    try:
        passes = [float(ratio) for ratio in prior["passes"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        return [1.0, 1.0]
    fits = len(passes) == 2 and all(1 / MOST_PASS <= ratio <= MOST_PASS for ratio in passes)
    return passes if fits else [1.0, 1.0]


def _read_seconds(prior: Any, name: str) -> dict[int, float]:
    """What `Pace.state` told of seconds by size; nothing where that is something else."""
    try:
        known = {int(size): float(seconds) for size, seconds in prior[name].items()}
        if not all(0 <= seconds < float("inf") for seconds in known.values()):
            return {}
        return {size: KEPT_DECIDING * seconds for size, seconds in known.items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return {}
