"""`Finder`, the part of `Adaptive` that drafts by lookup, where that promises more than any other round."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.control.matches import MOST_FOUND, Matches
from selfspec.control.plan import LOOKUP, Plan, RowOutcome, RowState
from selfspec.control.trust import Trust
from selfspec.control.worth import Worth


class Finder:
    """Plans from what earlier matches came to; every round tells it more, whoever drafted.

    Args:
        most: longest draft; default: as long as it pays.
    """

    def __init__(self, most: int | None = None) -> None:
        self.matches = Matches()
        self._most = MOST_FOUND if most is None else min(most, MOST_FOUND)
        self._trust = Trust()
        self._forecast = 0.0  # tokens of the round that was planned last, of all rows

    def plan(self, rows: Sequence[RowState], worth: Worth, usual: float) -> Plan | None:
        """Drafts for the rows with a match; None where they promise less than `usual` tokens per second of all rows."""
        matches = [(row.request_id, row.match) for row in rows]
        if not any(match for _, match in matches):
            return None
        seconds = worth.lookups()
        lengths, rate = self.matches.choose(matches, [min(self._most, row.room - 1) for row in rows], seconds)
        trusted = self._trust.ratio * rate
        if not any(lengths) or trusted < usual:
            return None
        self._forecast = rate * seconds[sum(lengths)]
        return Plan(LOOKUP, tuple(lengths), speedup=trusted * worth.plain_seconds / len(rows))

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome]) -> None:
        """Set what came of a round beside what lookup would have drafted, and beside what it promised."""
        emitted = 0
        for outcome in outcomes:
            emitted += outcome.num_emitted
            if outcome.looked is not None:
                self.matches.add(outcome.looked, outcome.request_id)
        self.matches.keep_rows([outcome.request_id for outcome in outcomes])
        tokens = emitted / max(1, len(outcomes))
        self.matches.pass_time(tokens)
        self._trust.pass_time(tokens)
        if plan.exit_layer == LOOKUP:
            self._trust.add(tokens, self._forecast / max(1, len(outcomes)))
