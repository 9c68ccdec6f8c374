"""`Kinds`: how much longer rounds that draft take on this machine than plain ones, beside what the table says of both.

The table of costs is measured piece by piece in tight loops. In a running decoder the caches are colder the longer and
the more varied a round is, so that all rounds take longer than in the table, but not all by as much.
"""

from __future__ import annotations

from collections import deque
from math import exp, isfinite, log
from statistics import median
from typing import Any, NamedTuple

from selfspec.control.costs import Costs

PLAIN, BY_LAYERS, BY_LOOKUP = range(3)  # kinds of rounds; the last two draft
LEAST, KEPT = 3, 6  # looks of a kind that are needed to set it beside another, and the most that are kept
NEAR = 96  # rounds between looks that may be compared: what else the machine does changes with time
GAIN, MOST_STEP = 0.25, 0.35  # how far a ratio follows a comparison, once there are a few; and the most, in logarithms
MOST = log(2.0)  # farther than this from the table no ratio goes, in logarithms
FORGET = 2048  # rounds after which half of what was learned is forgotten, if nothing confirms it
BLOCK_SHARE = 0.002  # of the time that all such blocks may take, beyond what drafts would have taken for their tokens
LEAST_APART = 48  # rounds from one to the next
Ratio = list[float]  # logarithm, number of comparisons, and the round of the last one


class Block(NamedTuple):
    """Plain rounds in a row where drafts go on, to have something to compare."""

    rounds: int
    cold: int  # at first, which are not looked at, since they find the caches as long rounds left them


# Each plain round takes less than the one before, on one machine from 1.7 to 1.1 times as long as later. A single row's
# drafts come out 1 to 4 % faster there where plain rounds are looked at sooner.
OF_ONE_ROW, OF_ROWS = Block(4, 1), Block(7, 4)


def block_of(num_rows: int) -> Block:
    """For batches of so many rows."""
    return OF_ONE_ROW if num_rows == 1 else OF_ROWS


class Kinds:
    """Ratios by kind and size of the batch, which follow comparisons of rounds that were near each other in time.

    Each is the median of a few looks, so that a single round that was held up says nothing; and what slows all rounds
    alike leaves their ratio as it was.

    Args:
        prior: what `state` of an earlier one returned; anything else, or that of another table, is passed over.

    Attributes:
        has_prior: whether it was not.
    """

    def __init__(self, costs: Costs, prior: Any = None) -> None:
        self._table = list(costs.plain.seconds)
        self._looks: list[deque[tuple[int, float]]] = [deque(maxlen=KEPT) for _ in range(3)]
        self._compared = [0, 0, 0]  # by kind: the round of the last plain look that it was set beside
        self._ratios: dict[int, list[Ratio]] = {}  # by size of the batch, of the kinds that draft
        self._size = 0
        self._round = 0
        self._last_plain = 0  # the round of the last plain look
        self.has_prior = self._read(prior)

    @property
    def round(self) -> int:
        """How many have passed."""
        return self._round

    def pass_rounds(self, count: int) -> None:
        self._round += count

    def look(self, kind: int, num_rows: int, expected: float, seconds: float) -> None:
        """Take what a round took, and should have taken by the table."""
        size = num_rows.bit_length()
        if size != self._size:
            self._size = size
            for looks in self._looks:
                looks.clear()
        if not (seconds > 0 and expected > 0 and isfinite(seconds)):  # a clock that was set back says nothing
            return
        self._looks[kind].append((self._round, log(seconds / expected)))
        if kind == PLAIN:
            self._last_plain = self._round
        for other in (BY_LAYERS, BY_LOOKUP) if kind == PLAIN else (kind,):
            self._compare(other)

    def ratio(self, kind: int, num_rows: int) -> float:
        """By how much longer rounds of a kind take than plain ones do, beside what the table says of both."""
        return exp(self._value(kind, num_rows.bit_length()))

    def has_compared(self, kind: int, num_rows: int) -> bool:
        """Whether the clock has told anything of a kind's rounds of about so many rows, half to twice as many."""
        size = num_rows.bit_length()
        return any(abs(known - size) <= 1 and of[kind][1] > 0 for known, of in self._ratios.items())

    def wants_plain(self, apart: float) -> bool:
        """Whether it is time for plain rounds, which should be so many rounds apart."""
        return self._round - self._last_plain >= max(LEAST_APART, apart)

    def state(self) -> dict[str, Any]:
        """Plain numbers to start a later one from."""
        ratios = {str(size): [[r[0], r[1], r[2] - self._round] for r in of[1:]] for size, of in self._ratios.items()}
        return {"table": self._table, "ratios": ratios, "last_plain": self._last_plain - self._round}

    def _value(self, kind: int, size: int) -> float:
        """The logarithm now, of the nearest size of which something is known; else that of the other kind that drafts,
        since both verify more than one token."""
        for asked in (kind, BY_LAYERS + BY_LOOKUP - kind):
            known = [(abs(other - size), of[asked]) for other, of in self._ratios.items() if of[asked][1] > 0]
            if known:
                value, _, at = min(known)[1]
                return float(value * 0.5 ** ((self._round - at) / FORGET))
        return 0.0

    def _compare(self, kind: int) -> None:
        since = self._round - NEAR
        plain = [x for at, x in self._looks[PLAIN] if at > max(since, self._compared[kind])]
        drafted = [x for at, x in self._looks[kind] if at > since]
        if min(len(plain), len(drafted)) < LEAST:
            return
        self._compared[kind] = self._last_plain
        known = self._ratios.setdefault(self._size, [[0.0] * 3 for _ in range(3)])[kind]
        value = self._value(kind, self._size)
        step = min(max(median(drafted) - median(plain) - value, -MOST_STEP), MOST_STEP)
        value += max(GAIN, 1 / (known[1] + 2)) * step
        known[:] = min(max(value, -MOST), MOST), known[1] + 1, self._round

    def _read(self, prior: Any) -> bool:
        """Start where an earlier one of the same table was; whether it is one."""
        try:
            if list(prior["table"]) != self._table:
                return False  # of another machine, or measured anew
            ratios = {
                int(size): [
                    [0.0] * 3,
                    *([min(max(float(x), -MOST), MOST), max(float(n), 0.0), min(float(at), 0.0)] for x, n, at in of),
                ]
                for size, of in prior["ratios"].items()
            }
            last = int(prior["last_plain"])
            if any(len(of) != 3 or not all(isfinite(n) for ratio in of for n in ratio) for of in ratios.values()):
                return False
            self._ratios, self._last_plain = ratios, last
            return True
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return False


def rounds_apart(speedup: float, plain_rounds: float, block: int = OF_ONE_ROW.rounds) -> float:
    """How many rounds that draft should lie between blocks of plain ones, for those to take no more than their share.

    Args:
        speedup: of the rounds that draft.
        plain_rounds: that one of them takes as long as.
        block: plain rounds of each block.
    """
    lost = block * max(0.0, 1 - 1 / max(speedup, 1e-6))  # plain rounds
    return lost / (BLOCK_SHARE * max(plain_rounds, 1e-6))
