"""`Trials`: rounds that are there to be compared: drafts of a batch that are tried, and plain rounds between drafts."""

from __future__ import annotations

from selfspec.control.decider import COLD, TRY_ROUNDS
from selfspec.control.kinds import LEAST, block_of


class Trials:
    """Counts rounds of both.

    Attributes:
        block: plain rounds still to come before drafts go on.
        is_in_block: whether the round that was planned last is one of those.
        trying: rounds still to come of drafts that are tried.
        plain_run: plain rounds since the last one that drafted.
        tells: whether the clock of the round that was observed last is to be set beside the table of costs.
        is_cold: whether that round found the caches as other rounds had left them, so that its clock says nothing.
        has_told: whether that round was one of a try that has told something.
    """

    def __init__(self) -> None:
        self.block = self.trying = self.plain_run = 0
        self.is_in_block = self.tells = self.is_cold = self.has_told = False

    def begin(self) -> bool:
        """A round is planned; whether it is one of a block."""
        self.is_in_block = self.block > 0
        self.block -= self.is_in_block
        return self.is_in_block

    def is_settled(self, num_rows: int) -> bool:
        """Whether more plain rounds came in a row than are compared with others."""
        return self.plain_run > block_of(num_rows).rounds

    def take(self, exit_layer: int | None, num_rows: int) -> None:
        """Take on what a round of so many rows drafted by."""
        self.plain_run = self.plain_run + 1 if exit_layer is None else 0
        block = block_of(num_rows)
        self.tells = block.cold < self.plain_run <= block.rounds
        self.is_cold, self.has_told = 0 < self.plain_run <= block.cold, False
        if self.trying and exit_layer:
            self.trying -= 1
            self.tells = self.trying < TRY_ROUNDS - COLD
            self.is_cold = not self.tells
            self.has_told = self.trying <= TRY_ROUNDS - COLD - LEAST

    def decide(self, is_tried: bool, goes_on: bool) -> None:
        """Something was decided, to be tried or not; `goes_on`: while such a try was under way."""
        self.trying = (self.trying if goes_on else TRY_ROUNDS) if is_tried else 0

    def compare(self, num_rows: int, anew: bool) -> None:
        """Plain rounds are to come before drafts go on; unless `anew`, those that are under way will do."""
        if anew or not self.block:
            self.block = block_of(num_rows).rounds
