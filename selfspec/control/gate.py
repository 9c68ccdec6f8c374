"""`Gate`: after which rounds few rows that do not pay for lookups may still be asked about, for a long match."""

from __future__ import annotations

GATE = 12  # tokens that they must match: texts that repeat themselves do
GATE_PAUSE, MOST_GATE_PAUSE = 2, 8  # rounds until they are asked about again, once in vain; each time twice as many


class Gate:
    """Counts rounds until it opens."""

    def __init__(self) -> None:
        self._left, self._next = 0, GATE_PAUSE  # rounds until it opens; and how many the next time

    @property
    def is_open(self) -> bool:
        return self._left <= 0

    @property
    def opens_after(self) -> int:
        """Rounds to come before one in which it is open; 0 where that may be the next."""
        return max(0, self._left - 1)

    def shut(self) -> None:
        """It was in vain."""
        self._left, self._next = self._next, min(2 * self._next, MOST_GATE_PAUSE)

    def forgive(self) -> None:
        """What was in vain before counts no more."""
        self._next = GATE_PAUSE

    def open(self) -> None:
        self._left, self._next = 0, GATE_PAUSE

    def pass_rounds(self, num_rounds: int = 1) -> None:
        self._left = max(0, self._left - num_rounds)
