"""`SmartSpec`: the draft length that promises the best goodput, tokens per second of the whole batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from selfspec.control.costs import Costs
from selfspec.control.plan import Plan, Policy
from selfspec.control.rows import RoundOutcome, RowState

HANDICAP = 1.1  # drafting must promise this much more than plain decoding
INTERVAL = 20  # rounds between decisions
PROBE = 200  # rounds off after which drafting is tried again
WINDOW = 10_000  # drafts over which acceptance is averaged
START = 0.8  # acceptance before any draft was judged
UNKNOWN = 0.7  # acceptance of a row of which no draft was judged


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
    """SmartSpec (arXiv 2406.14066), on a fixed exit layer, with measured costs in place of fitted ones.

    Every 20 rounds it takes the length k = 0, 1, 2, .. before goodput first falls; k = 0 counts for 1.1 times its
    goodput. The batch's B k tokens are then shared out by each row's own acceptance.

    While it drafts nothing it learns nothing about acceptance: only another batch or context can turn it on again. So,
    as in TurboSpec, 200 rounds of that are followed by one decision for the longest draft, as a probe.
    """

    exit_layer: int
    costs: Costs
    most: int = 8
    _length: int = field(default=0, init=False)  # k
    _left: int = field(default=0, init=False)  # rounds until the next decision
    _off: int = field(default=0, init=False)  # rounds decided to be plain, in a row
    _all: _Acceptance = field(default_factory=_Acceptance, init=False, repr=False)  # sums over the window
    _window: deque[tuple[int, int]] = field(default_factory=deque, init=False, repr=False)
    _rows: dict[int, _Acceptance] = field(default_factory=dict, init=False, repr=False)  # by request

    def plan(self, rows: Sequence[RowState]) -> Plan:
        self._rows = {row.request_id: self._rows.get(row.request_id) or _Acceptance() for row in rows}
        if self._left <= 0 and rows:
            self._decide(rows)
        self._left -= 1
        lengths = tuple(min(v, row.room - 1) for v, row in zip(self._share(rows), rows, strict=True))
        return Plan(self.exit_layer if any(lengths) else None, lengths)

    def observe(self, plan: Plan, rounds: Sequence[RoundOutcome]) -> None:
        for outcome in (row for round_ in rounds for row in round_.rows):
            row = self._rows.get(outcome.request_id)
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
        """How often a judged token was accepted lately."""
        return self._all.rate(START)

    def goodput(self, num_draft_tokens: int, num_rows: int, context: float) -> float:
        """Tokens per second that all rows would emit if each drafted so many."""
        tokens = num_rows * sum(self.acceptance**i for i in range(num_draft_tokens + 1))
        exit_layer = self.exit_layer if num_draft_tokens else None
        return tokens / max(self.costs.round(exit_layer, (num_draft_tokens,) * num_rows, context), 1e-12)

    def _decide(self, rows: Sequence[RowState]) -> None:
        self._left = INTERVAL
        if self._off >= PROBE:
            self._length = self.most
        else:
            context = self.costs.context_of([row.content_length for row in rows])
            best = HANDICAP * self.goodput(0, len(rows), context)
            self._length = 0
            while self._length < self.most:
                goodput = self.goodput(self._length + 1, len(rows), context)
                if goodput < best:
                    break
                self._length, best = self._length + 1, goodput
        self._off = 0 if self._length else self._off + INTERVAL

    def _share(self, rows: Sequence[RowState]) -> list[int]:
        """Each row's length: v = int(0.5 + (k - 1) B alpha / sum of alphas) + 1."""
        if not self._length:
            return [0] * len(rows)
        rates = [self._rows[row.request_id].rate(UNKNOWN) for row in rows]
        total = sum(rates)
        if total <= 0:
            return [self._length] * len(rows)
        share = (self._length - 1) * len(rows) / total
        return [min(int(0.5 + share * rate) + 1, self.most) for rate in rates]
