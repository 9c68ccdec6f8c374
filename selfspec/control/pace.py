"""`Pace`: what the clock says of rounds, and of their stages, beside the table of costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selfspec.control.costs import Costs
from selfspec.control.kinds import BY_LAYERS, BY_LOOKUP, PLAIN, Kinds
from selfspec.control.plan import LOOKUP, Seconds

PICK_STEP, MOST_PICK = 0.34, 200.0  # how fast the price of picks follows the clock, and how far
PASS_STEP, MOST_PASS = 0.1, 2.0  # the same of early passes, up and down
DECIDING_STEP, MOST_DECIDING = 0.25, 1.0  # and of deciding; the most, in plain rounds
KEPT_DECIDING = 0.75  # of it is where a later one starts: where nothing is drafted for that, nothing would unlearn it


class Pace:
    """What picks and deciding cost beside all else of their round, and early passes beside its verification.

    Parts of one round are set against each other: what a round takes when others use the machine says nothing about
    other rounds, unless they were near it, see `Kinds`.

    Attributes:
        pick: how much longer picks take than in the table of costs.
        passes: and early passes, and those of copies, beside the verifications of the same rounds.
        deciding: seconds that deciding takes in a round that drafts, by bit length of the number of rows.
        kinds: how much longer rounds that draft take than plain ones.
    """

    def __init__(self, costs: Costs, prior: Any = None) -> None:
        self._costs, self.kinds = costs, Kinds(costs, prior)
        self.pick, self.passes = 1.0, [1.0, 1.0]
        self.deciding = _read_deciding(prior) if self.kinds.has_prior else {}
        self._most_deciding: dict[int, float] = {}  # by rows
        self._has_drafted = False
        self._decided: list[float] = []  # seconds, of the rounds since the last look at the clock

    def deciding_of(self, num_rows: int) -> float:
        """Seconds that deciding takes in a round of so many rows; else of fewer, which drafts soon correct."""
        return self.deciding[max(known)] if (known := [n for n in self.deciding if n <= num_rows.bit_length()]) else 0.0

    def state(self) -> dict[str, Any]:
        """Plain numbers to start a later one from."""
        return self.kinds.state() | {"deciding": {str(size): seconds for size, seconds in self.deciding.items()}}

    def pass_round(self, decided: float, num_idle: int = 0) -> None:
        """Count the seconds that deciding took in a round, and the rounds before it that nothing was said of."""
        self._decided.append(decided)
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
        decided, self._decided = sum(self._decided) / len(self._decided), []
        if layers > 0 and expected["draft"] > 0 and decided > 0:
            most = self._most_deciding.get(num_rows)
            if most is None:
                most = self._most_deciding[num_rows] = MOST_DECIDING * self._costs.plain_round(num_rows)
            known = self.deciding_of(num_rows)
            self.deciding[num_rows.bit_length()] = known + DECIDING_STEP * (min(decided / pace, most) - known)
        if min(seconds.draft, seconds.verify, expected["draft"], expected["verify"]) > 0:
            ratio = seconds.draft / expected["draft"] / (seconds.verify / expected["verify"])
            self.passes[copies] += PASS_STEP * (min(max(ratio, 1 / MOST_PASS), MOST_PASS) - self.passes[copies])
        kind = PLAIN if exit_layer is None else BY_LOOKUP if exit_layer == LOOKUP else BY_LAYERS
        priced = self.passes[copies] * expected["draft"] + expected["verify"] + expected["head"] + expected["rest"]
        took = layers + seconds.pick + seconds.rest  # what other layers would have picked is not in the price
        self.kinds.look(kind, num_rows, priced + self.pick * expected["pick"], took)


def _read_deciding(prior: Any) -> dict[int, float]:
    """What `Pace.state` told of it; nothing where that is something else."""
    try:
        known = {int(size): float(seconds) for size, seconds in prior["deciding"].items()}
        if not all(0 <= seconds < float("inf") for seconds in known.values()):
            return {}
        return {size: KEPT_DECIDING * seconds for size, seconds in known.items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return {}
