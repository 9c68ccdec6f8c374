"""`Pace`: how long the engine needs for what it has to do, from what it did lately."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp

from selfspec.serving.calls import Call

HALF_SECONDS, HALF_TOKENS = 20.0, 8192.0  # after which a measurement counts half: of the rate, and of ends
PRIOR_TOKENS = 512.0  # of the single output that has ended by itself before any did


class Pace:
    """Measured tokens per second, and how early outputs end. Times are seconds of the monotonic clock.

    The rate is that of times in which requests waited, once there were some. How many tokens an output still gets
    follows from the outputs that ended by themselves, per new token; those that ended at their limit say that outputs
    are long, and no more (an exponential law, estimated from censored lengths).
    """

    def __init__(self) -> None:
        self._tokens, self._seconds, self._is_full = 0.0, 0.0, False  # of the rate
        self._ends, self._new = 1.0, PRIOR_TOKENS
        self._mark = 0.0

    def seed(self, rate: float) -> None:
        """Begin with these tokens per second of a full batch, which count as a second's; 0: they are not known."""
        self._tokens, self._seconds, self._is_full = rate, float(rate > 0), rate > 0

    def begin(self, now: float) -> None:
        """There is something to do again."""
        self._mark = now

    def add(self, num_tokens: int, num_ends: int, is_full: bool, now: float) -> None:
        """Take what came since the last time.

        Args:
            num_tokens: new ones, of all outputs.
            num_ends: outputs that ended by themselves, before their limit.
            is_full: requests waited.
        """
        share = 0.5 ** (num_tokens / HALF_TOKENS)
        self._ends, self._new = share * self._ends + num_ends, share * self._new + num_tokens
        seconds, self._mark = max(0.0, now - self._mark), now
        if self._is_full and not is_full:
            return
        kept = 0.5 ** (seconds / HALF_SECONDS) if self._is_full == is_full else 0.0
        self._tokens, self._seconds = kept * self._tokens + num_tokens, kept * self._seconds + seconds
        self._is_full = is_full

    def seconds(self, calls: Iterable[Call]) -> float:
        """In which all outputs of these calls end; 0 where nothing was measured."""
        if not self._tokens:
            return 0.0
        return self._seconds / self._tokens * sum(self._left(call) for call in calls)

    def _left(self, call: Call) -> float:
        """Tokens that a call still gets, on average."""
        most = [call.num_remaining(choice) for choice in call.choices]
        if call.params.ignore_eos and not call.params.stop:
            return sum(most)
        rate = self._ends / self._new
        return sum((1.0 - exp(-rate * one)) / rate for one in most)
