"""`Pace`: what the clock says of a round's stages beside the table of costs."""

from __future__ import annotations

from collections.abc import Mapping

from selfspec.control.costs import Costs
from selfspec.control.plan import Seconds

PICK_STEP, MOST_PICK = 0.34, 200.0  # how fast the price of picks follows the clock, and how far
PASS_STEP, MOST_PASS = 0.1, 2.0  # the same of early passes, up and down
DECIDING_STEP, MOST_DECIDING = 0.25, 1.0  # and of deciding; the most, in plain rounds


class Pace:
    """What picks and deciding cost beside all else of their round, and early passes beside its verification.

    Parts of one round are set against each other only: what a round takes when others use the machine says nothing
    about other rounds.

    Attributes:
        pick: how much longer picks take than in the table of costs.
        passes: and early passes, beside the verifications of the same rounds.
        deciding: seconds that deciding takes in a round that drafts.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.pick = self.passes = 1.0
        self.deciding = 0.0
        self._most_deciding: dict[int, float] = {}  # by rows
        self._decided: list[float] = []  # seconds, of the rounds since the last look at the clock

    def pass_round(self, decided: float) -> None:
        """Count the seconds that deciding took in a round."""
        self._decided.append(decided)

    def look(self, num_rows: int, expected: Mapping[str, float], seconds: Seconds) -> None:
        """Set the clock of a round of `num_rows` rows beside what was expected of its stages, see `Costs.stages`."""
        layers = seconds.draft + seconds.verify + seconds.head
        pace = layers / (expected["draft"] + expected["verify"] + expected["head"])
        if layers > 0 and seconds.pick > 0 and expected["pick"] > 0:  # a clock that was set back says nothing
            ratio = min(max(seconds.pick / expected["pick"] / pace, 1.0), MOST_PICK)
            self.pick += PICK_STEP * (ratio - self.pick)
        decided, self._decided = sum(self._decided) / len(self._decided), []
        if layers > 0 and expected["draft"] > 0 and decided > 0:
            most = self._most_deciding.get(num_rows)
            if most is None:
                most = self._most_deciding[num_rows] = MOST_DECIDING * self._costs.plain_round(num_rows)
            self.deciding += DECIDING_STEP * (min(decided / pace, most) - self.deciding)
        if min(seconds.draft, seconds.verify, expected["draft"], expected["verify"]) > 0:
            ratio = seconds.draft / expected["draft"] / (seconds.verify / expected["verify"])
            self.passes += PASS_STEP * (min(max(ratio, 1 / MOST_PASS), MOST_PASS) - self.passes)
