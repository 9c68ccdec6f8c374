"""What a draft is worth: expected tokens per second, for every exit layer and every confidence to stop at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selfspec.control.costs import CONTEXT, LOOKUP_SECONDS, Costs
from selfspec.control.matches import MOST_FOUND
from selfspec.control.tracker import Floats

MOST = 18  # longest draft considered
MOST_PACKED = 256  # drafted by lookup in all: the logits of a round's tokens are held at once
LOOKUP_GRID = (0, 1, 2, 3, 4, 5, 7, 11, 17, 31, 63)  # drafted tokens per row at which lookups are priced
MOST_GUESSES = 7  # checked by an early pass
NOTICEABLE = 0.05  # smaller changes are not worth pricing everything anew


class Worth:
    """Costs of a round of `num_rows` rows, the longest of `context` tokens, in arrays, and what they say of drafts.

    One row's draft is taken to go on while its tokens' bins of confidence lie above a bound, at most `MOST` tokens,
    each token independently of those before it; it stops after the first token below. Several rows are taken to stop
    together, after a number of tokens.
    """

    def __init__(self, costs: Costs, num_rows: int, context: float = CONTEXT) -> None:
        exits = np.arange(1, costs.num_layers)
        self.num_rows, self._costs = num_rows, costs
        self._early = np.array([[costs.early_pass(e, num_rows)] for e in exits.tolist()])  # [L - 1, 1]
        self._first = np.array([[costs.early_pass(e, num_rows, first=True)] for e in exits.tolist()])
        self.step_head, self.step_pick = costs.head(num_rows), costs.pick(num_rows)
        tokens = [num_rows * width for width in range(1, MOST + 2)]
        one_layer = np.array([costs.verify(costs.num_layers - 1, num_rows, n) for n in tokens])
        self._above = (costs.num_layers - exits)[:, None]  # [L - 1, 1]: layers that verify
        self._below = exits[:, None]
        self.pick = np.array([costs.pick(n) for n in tokens])
        self.rest = costs.rest(num_rows)
        heads = np.array([costs.head(n) for n in tokens])
        self._late = self._above * one_layer + heads + self.rest  # [L - 1, MOST + 1], without picks
        self.plain = costs.stages(None, (0,) * num_rows)
        self._plain = sum(self.plain.values())
        self._lengths = np.arange(1.0, MOST + 1)
        self._lookup_tables: tuple[Floats, Floats, Floats] | None = None  # see `_price_lookups`
        self._lines = np.arange(costs.num_layers - 1)[:, None] * (MOST + 1)  # where they begin in `_verify`
        self._wider: dict[int, list[float]] = {}  # what `guesses` knows of exit layers
        self._pick = self._passes = self._part = 1.0
        self._deciding = 0.0
        self._slower = 1.0  # rounds by lookup
        self._lookups: list[float] | None = None
        self.move(context)

    def move(self, context: float) -> None:
        """Take on that the longest row has `context` tokens: every layer of a pass then reads as much more."""
        self._more = self.num_rows * self._costs.context * max(0.0, context - CONTEXT)  # seconds a layer
        self._price()

    def price(self, pick: float, passes: float = 1.0, deciding: float = 0.0, lookups: float = 1.0) -> None:
        """Take on how much longer than in the table picks take (sampling does) and early passes, beside the rest.

        Args:
            deciding: seconds that deciding takes in every round that drafts.
            lookups: how much longer rounds by lookup take than plain ones, beside what the table says of both.
        """
        if abs(lookups / self._slower - 1) >= NOTICEABLE / 5:
            self._slower, self._lookups = lookups, None
        near = abs(deciding - self._deciding) < NOTICEABLE * self.plain_seconds
        if near and abs(pick / self._pick - 1) < NOTICEABLE and abs(passes / self._passes - 1) < NOTICEABLE:
            return
        self._pick, self._passes, self._deciding = pick, passes, deciding
        self._price()
        self._wider.clear()

    def draft_over(self, share: float) -> None:
        """Take on that drafts are picked among a share of the vocabulary, with a head as much smaller."""
        if share != self._part:
            self._part = share
            self._forget()
            self._wider.clear()

    def _price(self) -> None:
        """Arrays follow when they are asked for: a context may move, and prices change, several times before."""
        self.plain_seconds = self._plain + self._costs.num_layers * self._more + (self._pick - 1) * self.plain["pick"]
        self._verifying: Floats | None = None
        self._lookups = None
        self._forget()

    def _forget(self) -> None:
        self._steps: tuple[Floats, Floats] | None = None
        self._rounds: Floats | None = None
        self._limits: Floats | None = None

    @property
    def _verify(self) -> Floats:
        """`[L - 1, MOST + 1]`: everything of a round but early passes and their picks, by drafted tokens per row."""
        if self._verifying is None:
            self._verifying = self._late + self._above * self._more
            self._verifying += self._pick * self.pick + self._deciding
        return self._verifying

    @property
    def _drafting(self) -> tuple[Floats, Floats]:
        """`[L - 1, 1]`: one drafted token per row, and the round's first pass beside them.

        The last drafted token runs through early layers too, without a head.
        """
        if self._steps is None:
            read = self._below * self._more  # by an early pass
            picking = self._part * (self.step_head + self._pick * self.step_pick)
            self._steps = self._passes * (self._early + read) + picking, self._passes * (self._first + read)
        return self._steps

    def _all_rounds(self) -> Floats:
        """`[L - 1, MOST]`: rounds of drafts of every length."""
        if self._rounds is None:
            step, begin = self._drafting
            self._rounds = step * self._lengths + begin + self._verify[:, 1:]
        return self._rounds

    def rates(self, right: Floats, share: Floats) -> tuple[Floats, Floats]:
        """(tokens per second of all rows, drafted tokens per row), `[L - 1, ways to stop]`.

        Of one row, the ways are to stop below each bin; of several, after each number of tokens.
        """
        if self.num_rows > 1:
            acceptance = (right * share).sum(1, keepdims=True)
            kept = 1 + (acceptance**self._lengths).cumsum(1)
            return self.num_rows * kept / self._all_rounds(), np.broadcast_to(self._lengths, kept.shape)
        above = np.empty((2, *share.shape))
        above[0] = share
        np.multiply(right, share, out=above[1])
        # P(a token lies above the bound), P(it does, and is right)
        above = np.minimum(np.add.accumulate(above[:, :, ::-1], 2)[:, :, ::-1], 1 - 1e-6)
        drafted, kept = (1 - above**MOST) / (1 - above)
        low = np.minimum(drafted.astype(np.int64), MOST - 1)
        at, verify, (step, begin) = low + self._lines, self._verify.reshape(-1), self._drafting
        verifying = verify.take(at)
        verifying += (drafted - low) * (verify.take(at + 1) - verifying)
        return (1 + above[1][:, :1] * kept) / (drafted * step + begin + verifying), drafted

    def limits(self) -> Floats:
        """`[L - 1]`: tokens per second of all rows by an exit layer that is always right; no draft promises more."""
        if self._limits is None:
            kept = self.num_rows * (1 + self._lengths)
            self._limits = np.maximum.reduce(kept / self._all_rounds(), 1)
        return self._limits

    def lookups(self) -> list[float]:
        """Seconds of rounds that draft 0, 1, 2, .. tokens by lookup in all, for the whole model to verify."""
        if self._lookups is None:
            self._lookups = self._price_lookups()
        return self._lookups

    @property
    def least_lookup(self) -> float:
        """Seconds of a token drafted by lookup where one is cheapest."""
        fixed, picks = self._lookup_prices()[2]
        return self._slower * float((np.diff(fixed + self._pick * picks) / np.diff(LOOKUP_GRID)).min()) / self.num_rows

    def _lookup_prices(self) -> tuple[Floats, Floats, Floats]:
        """Of rounds by lookup, by drafted tokens in all: what does not change, and picks; and both on the grid."""
        if self._lookup_tables is None:
            rows, costs = self.num_rows, self._costs
            tokens = [rows * (1 + drafted) for drafted in LOOKUP_GRID]
            ragged = costs.ragged(rows) if costs.ragged is not None and rows > 1 else 1.0
            layers = max(1.0, ragged) * np.array([costs.verify(0, rows, n) for n in tokens])
            rest = np.array([costs.head(n) for n in tokens]) + self.rest + rows * LOOKUP_SECONDS
            grid = np.stack((layers + rest, np.array([costs.pick(n) for n in tokens])))
            drafted = np.arange(1, min(rows * MOST_FOUND, MOST_PACKED) + 1) / rows
            fixed, picks = (np.interp(drafted, LOOKUP_GRID, each) for each in grid)
            self._lookup_tables = fixed, picks, grid
        return self._lookup_tables

    def _price_lookups(self) -> list[float]:
        fixed, picks, _ = self._lookup_prices()
        seconds = fixed + self._pick * picks + (self._costs.num_layers * self._more + self._deciding)
        return [self.plain_seconds, *(self._slower * seconds).tolist()]

    def rounds(self, exit_layer: int) -> list[float]:
        """Seconds of rounds in which every row drafts 0..MOST tokens."""
        line, verify = exit_layer - 1, self._verify[exit_layer - 1]
        step, begin = (float(each[line, 0]) for each in self._drafting)
        drafted = step * self._lengths + begin + verify[1:]
        return [begin + float(verify[0]), *drafted.tolist()]

    def one_more(self, exit_layer: int, drafted: float) -> float:
        """Seconds that one more drafted token per row adds, for each row, to a round of about `drafted` per row."""
        line, at = exit_layer - 1, min(int(drafted), MOST - 2)
        wider = (self._verify[line, at + 2] - self._verify[line, at]) / 2
        return float(self._drafting[0][line, 0] + wider) / self.num_rows

    def beside(self, exit_layer: int, drafted: float) -> tuple[float, float]:
        """Seconds that drafting tokens beside the others adds to a round of about `drafted` per row: at all, and each.

        The last pass becomes wider, and verification.
        """
        line, costs, rows = exit_layer - 1, self._costs, self.num_rows
        narrow, some, many = (costs.wide_pass(exit_layer, rows, rows + n) for n in (0, 1, 5))
        at = min(int(drafted), MOST - 2)
        wider = float(self._verify[line, at + 2] - self._verify[line, at]) / (2 * rows)
        each = self._passes * (many - some) / 4
        return self._passes * (some - narrow) - each, each + wider

    def guesses(self, exit_layer: int, chances: Sequence[float]) -> int:
        """How many free guesses an early pass of a single row had best check; 0: none are worth it.

        Args:
            chances: that the exit picks the first guess, the first two, ...; falling.
        """
        wider = self._wider.get(exit_layer)
        if wider is None:
            wider = self._wider[exit_layer] = self._widths(exit_layer)
        step = float(self._drafting[0][exit_layer - 1, 0])
        best, count, saved = 0.0, 0, 0.0
        for n, (chance, more) in enumerate(zip(chances, wider, strict=False), 1):
            saved += chance * step
            if saved - more > best:
                best, count = saved - more, n
        return count

    def _widths(self, exit_layer: int) -> list[float]:
        """Seconds that 1, 2, .. `MOST_GUESSES` guesses add to an early pass of a single row."""
        costs, wider = self._costs, []
        narrow = costs.early_pass(exit_layer, 1)
        for n in range(1, MOST_GUESSES + 1):
            picking = costs.head(1 + n) - self.step_head + self._pick * (costs.pick(1 + n) - self.step_pick)
            wider.append(self._passes * (costs.wide_pass(exit_layer, 1, 1 + n) - narrow) + self._part * picking)
        return wider
