"""`Pace`: how long the engine needs for what it has to do, from what it did lately."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from math import exp

from selfspec.serving.calls import Call

HALF_SECONDS, HALF_TOKENS = 20.0, 8192.0  # after which a measurement counts half: of the speed, and of ends
PRIOR_TOKENS = 512.0  # of the single output that has ended by itself before any did


@dataclass(slots=True)
class Work:
    """What an engine did: new tokens and prompt tokens, and the seconds that each took."""

    num_new: float = 0.0
    new_seconds: float = 0.0
    num_read: float = 0.0
    read_seconds: float = 0.0

    def add(self, other: Work, share: float = 1.0) -> None:
        """Take other work, too, and of this one a share."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        self.num_new, self.new_seconds, self.num_read, self.read_seconds = (share * own + more for own, more in pairs)

    def seconds(self, num_new: float, num_read: float) -> float:
        """That so many tokens take; 0 where nothing is known."""
        new = num_new * self.new_seconds / self.num_new if self.num_new else 0.0
        return new + (num_read * self.read_seconds / self.num_read if self.num_read else 0.0)


class Pace:
    """Measured seconds of a token, and how early outputs end.

    Seconds are those of times in which requests waited, once there were some. How many tokens an output still gets
    follows from the outputs that ended by themselves, per new token; those that ended at their limit say that outputs
    are long, and no more (an exponential law, estimated from censored lengths).
    """

    def __init__(self) -> None:
        self._work, self._is_full = Work(), False
        self._ends, self._new = 1.0, PRIOR_TOKENS

    def seed(self, work: Work) -> None:
        """Begin with the work of a full batch."""
        self._work, self._is_full = work, work.num_new > 0

    def add(self, work: Work, num_ends: int, is_full: bool) -> None:
        """Take what was done.

        Args:
            num_ends: outputs that ended by themselves, before their limit.
            is_full: requests waited.
        """
        share = 0.5 ** (work.num_new / HALF_TOKENS)
        self._ends, self._new = share * self._ends + num_ends, share * self._new + work.num_new
        if work.num_new and (is_full or not self._is_full):
            kept = 0.5 ** ((work.new_seconds + work.read_seconds) / HALF_SECONDS)
            self._work.add(work, kept if self._is_full == is_full else 0.0)
            self._is_full = is_full

    def seconds(self, calls: Iterable[Call]) -> float:
        """In which all outputs of these calls end; 0 where nothing was measured."""
        calls = list(calls)
        num_read = sum(call.num_prompt_tokens for call in calls if call.started is None)
        return self._work.seconds(sum(map(self._left, calls)), num_read)

    def _left(self, call: Call) -> float:
        """Tokens that a call still gets, on average."""
        most = [call.num_remaining(choice) for choice in call.choices]
        if call.params.ignore_eos and not call.params.stop:
            return sum(most)
        rate = self._ends / self._new
        return sum((1.0 - exp(-rate * one)) / rate for one in most)
