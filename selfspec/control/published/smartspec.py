"""SmartSpec (arXiv 2406.14066): the draft length with the most goodput, the tokens per second of the whole batch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from selfspec.control.costs import Costs
from selfspec.control.plan import Policy
from selfspec.core import LOOKUP, Plan, RoundOutput, Sequence

HANDICAP = 1.1  # factor on the goodput of plain decoding
INTERVAL = 20  # rounds between decisions
PROBE = 200  # plain rounds after which drafting is tried again
WINDOW = 10_000  # drafts over which acceptance is averaged
START = 0.8  # acceptance rate before any draft was judged
UNKNOWN = 0.7  # acceptance rate of a row without judged drafts


@dataclass(slots=True)
class _Acceptance:
    accepted: int = 0
    judged: int = 0

    def add(self, accepted: int, judged: int) -> None:
        self.accepted += accepted
        self.judged += judged

    def rate(self, without: float) -> float:
        return self.accepted / self.judged if self.judged > 0 else without


@dataclass(slots=True)
class SmartSpec(Policy):
    """SmartSpec on a fixed exit layer, with measured costs in place of fitted ones.

    Every 20 rounds it increases the length k from 0 until goodput falls; the goodput of k = 0 counts 1.1 times. The
    batch's B k tokens are then distributed by each row's acceptance rate.

    Plain rounds give no information about acceptance. So, as in TurboSpec, 200 plain rounds are followed by one
    interval with the longest draft, as a probe.
    """

    exit_layer: int
    costs: Costs
    most: int = 8
    _length: int = field(default=0, init=False)  # k
    _left: int = field(default=0, init=False)  # rounds until the next decision
    _off: int = field(default=0, init=False)  # consecutive plain rounds
    _all: _Acceptance = field(default_factory=_Acceptance, init=False, repr=False)  # sums over the window
    _window: deque[tuple[int, int]] = field(default_factory=deque, init=False, repr=False)
    _rows: dict[int, _Acceptance] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: list[Sequence]) -> Plan:
        self._rows = {row.seq_id: self._rows.get(row.seq_id) or _Acceptance() for row in rows}
        if self._left <= 0 and rows:
            self._decide(rows)
        self._left -= 1
        lengths = tuple(min(v, row.num_remaining - 1) for v, row in zip(self._share(rows), rows, strict=True))
        return Plan(self.exit_layer if any(lengths) else None, lengths)

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        for outcome in (row for round_ in rounds for row in round_.rows):
            row = self._rows.get(outcome.seq_id)
            if row is None or not outcome.num_judged:
                continue
            datum = outcome.num_accepted, outcome.num_judged
            row.add(*datum)
            self._all.add(*datum)
            self._window.append(datum)
            if len(self._window) > WINDOW:
                accepted, judged = self._window.popleft()
                self._all.add(-accepted, -judged)

    @property
    def acceptance(self) -> float:
        """The share of accepted tokens among those judged in the window."""
        return self._all.rate(START)

    def goodput(self, num_speculative_tokens: int, num_rows: int, context: float) -> float:
        """Expected tokens per second of all rows if each drafts `num_speculative_tokens`."""
        tokens = num_rows * sum(self.acceptance**i for i in range(num_speculative_tokens + 1))
        exit_layer = self.exit_layer if num_speculative_tokens else None
        return tokens / max(self.costs.round(exit_layer, (num_speculative_tokens,) * num_rows, context), 1e-12)

    def _decide(self, rows: list[Sequence]) -> None:
        self._left = INTERVAL
        if self._off >= PROBE:
            self._length = self.most
        else:
            context = sum([row.num_tokens for row in rows]) / len(rows)
            best = HANDICAP * self.goodput(0, len(rows), context)
            self._length = 0
            while self._length < self.most:
                goodput = self.goodput(self._length + 1, len(rows), context)
                if goodput < best:
                    break
                self._length, best = self._length + 1, goodput
        self._off = 0 if self._length else self._off + INTERVAL

    def _share(self, rows: list[Sequence]) -> list[int]:
        """Each row's length: v = int(0.5 + (k - 1) B alpha / sum of alphas) + 1."""
        if not self._length:
            return [0] * len(rows)
        rates = [self._rows[row.seq_id].rate(UNKNOWN) for row in rows]
        total = sum(rates)
        if total <= 0:
            return [self._length] * len(rows)
        share = (self._length - 1) * len(rows) / total
        return [min(int(0.5 + share * rate) + 1, self.most) for rate in rates]


@dataclass(slots=True)
class SmartSpecLookup(SmartSpec):
    """SmartSpec with prompt lookup as its drafter: goodput includes the share of rows with a match.

    That share is a moving average over the rows and rounds that may draft; it starts at 1.
    """

    exit_layer: int = field(default=LOOKUP, init=False)
    _matched: float = field(default=1.0, init=False)

    def observe(self, plan: Plan, rounds: list[RoundOutput]) -> None:
        SmartSpec.observe(self, plan, rounds)
        if plan.exit_layer != LOOKUP:
            return
        lengths = dict(zip(self._rows, plan.draft_lengths, strict=True))
        for outcome in (row for round_ in rounds for row in round_.rows):
            if lengths[outcome.seq_id]:
                self._matched += 0.05 * ((outcome.num_drafted > 0) - self._matched)

    def goodput(self, num_speculative_tokens: int, num_rows: int, context: float) -> float:
        """Expected tokens per second of all rows if each row with a match drafts `num_speculative_tokens`."""
        plain = self.costs.plain_round(num_rows, context)
        if not num_speculative_tokens:
            return num_rows / max(plain, 1e-12)
        drafting = self.costs.round(LOOKUP, (num_speculative_tokens,) * num_rows, context)
        kept = num_rows * sum(self.acceptance**i for i in range(num_speculative_tokens + 1))
        share = self._matched
        return (share * kept + (1 - share) * num_rows) / max(share * drafting + (1 - share) * plain, 1e-12)
