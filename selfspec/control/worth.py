"""What a draft is worth: expected tokens per second, for every exit layer and every confidence to stop at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.control.costs import Costs
from selfspec.control.decay import Floats
from selfspec.control.measured import CONTEXT
from selfspec.control.pieces import LOOKUP_GRID, MOST, ROUNDS, STEP, WIDTH, Coefficients, Pieces, coefficients

NOTICEABLE = 0.05  # smaller changes are not worth pricing everything anew
CAPS = (1, 2, 3, 4, 6, 9, 13, MOST)  # tokens after which a row's draft may be taken to end
_LENGTHS, _CAPS = np.arange(1.0, MOST + 1), np.array(CAPS, np.float64)
Ints = NDArray[np.signedinteger[Any]]
Way = tuple[float, bool]  # of drafting: over which share of the vocabulary, and whether by copies
WHOLE: Way = (1.0, False)


class Worth:
    """Costs of a round of `num_rows` rows of `context` tokens each, in arrays, and what they say of drafts.

    One row's draft is taken to go on while its tokens' bins of confidence lie above a bound, and at most for a number
    of tokens, each independently of those before it; it stops after the first token below. Several rows are taken to
    stop together, after a number of tokens.

    Args:
        copies: whether they may draft, where there are costs of them.
    """

    def __init__(self, costs: Costs, num_rows: int, context: float = CONTEXT, copies: bool = True) -> None:
        self.num_rows, self._costs = num_rows, costs
        self._has_copies = copies and costs.copies is not None
        self._pieces = Pieces.of(costs, num_rows)
        self._pick, self._passes, self._deciding = 1.0, (1.0, 1.0), 0.0
        self._way = WHOLE
        self._slower = 1.0  # rounds by lookup
        self._lookups: list[float] | None = None
        self._least_lookup: float | None = None
        self._line: list[float] = []  # of the exit layer that follows; 0: none
        self._line_for = 0
        self.move(context)

    def move(self, context: float) -> None:
        """Take on that every row has `context` tokens: every layer of a pass then reads as much more."""
        self._context = context
        # Seconds a layer, in a pass of one token per row, and for each further one of all rows.
        self._more = self._costs.reading(self.num_rows, context)
        self._further = self._costs.reading(self.num_rows, context, 2) - self._more
        self._price()

    def price(
        self, pick: float, passes: tuple[float, float] = (1.0, 1.0), deciding: float = 0.0, lookups: float = 1.0
    ) -> None:
        """Take on how much longer than in the table picks take (sampling does) and early passes, beside the rest.

        Args:
            passes: of the layers themselves, and of copies.
            deciding: seconds that deciding takes in every round that drafts.
            lookups: how much longer rounds by lookup take than plain ones, beside what the table says of both.
        """
        if abs(lookups / self._slower - 1) >= NOTICEABLE / 5:
            self._slower, self._lookups, self._least_lookup = lookups, None, None
        near = abs(deciding - self._deciding) < NOTICEABLE * self.plain_seconds
        ratios = zip((pick, *passes), (self._pick, *self._passes), strict=True)
        if near and all(abs(new / old - 1) < NOTICEABLE for new, old in ratios):
            return
        self._pick, self._passes, self._deciding = pick, passes, deciding
        self._price()

    def draft_by(self, share: float, copies: bool = False) -> None:
        """Take on that drafts are picked among a share of the vocabulary, with a head as much smaller, or by copies."""
        if (share, copies) != self._way:
            self._way, self._line_for = (share, copies), 0

    def _price(self) -> None:
        """Arrays follow when they are asked for: a context may move, and prices change, several times before."""
        pieces, num_layers = self._pieces, self._costs.num_layers
        self.plain_seconds = pieces.plain_seconds + num_layers * self._more + (self._pick - 1) * pieces.plain["pick"]
        self._lookups = self._least_lookup = None
        self._known: dict[tuple[Way, ...], tuple[Floats, Ints]] = {}
        self._by_way: dict[Way, Floats] = {}
        self._known_limits: dict[Way, Floats] = {}
        self._line_for = 0

    def _priced(self, ways: tuple[Way, ...]) -> tuple[Floats, Ints]:
        """`[ways, L - 1, WIDTH]`: seconds as in `Pieces.table`; and `[ways, L - 1, 1]`: where its `ROUNDS` begin."""
        if ways not in self._known:
            seconds = np.empty((len(ways), (self._costs.num_layers - 1) * WIDTH))
            for line, way in zip(seconds, ways, strict=True):
                np.dot(self._coefficients(way), self._pieces.table(way[1]), out=line)
            begins = np.arange(ROUNDS, seconds.size, WIDTH).reshape(len(ways), -1, 1)
            priced = seconds.reshape(len(ways), -1, WIDTH)
            self._known[ways] = priced, begins
            self._by_way |= zip(ways, priced, strict=True)
        return self._known[ways]

    def _coefficients(self, way: Way) -> Coefficients:
        """What a way of drafting is priced by."""
        (share, copies), more = way, self._more
        return coefficients(self._pick, self._passes[copies], share, more, self._further, self._deciding)

    def rates(
        self, right: Floats, share: Floats, ways: Sequence[Way] = (WHOLE,), coverages: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """(tokens per second of all rows `[ways, L - 1, stops]`, drafted tokens per row `[L - 1, stops]`).

        Of one row, the stops are to end below each bin or after some number of tokens, whichever comes first, since
        some models are as sure of every token; of several, after each number of tokens.

        Args:
            coverages: `[ways, L - 1]`, by what `right` is multiplied; None: by 1.
        """
        seconds, begins = self._priced(tuple(ways))
        is_less = coverages is not None and bool(coverages.min() < 1)
        likely = np.empty((1 + (len(ways) if is_less else 1), *share.shape))
        likely[0] = share
        np.multiply(right, share, out=likely[1])
        if is_less and coverages is not None:
            likely[1:] = likely[1] * coverages[:, :, None]
        if self.num_rows > 1:
            acceptance = np.add.reduce(likely[1:], 2, keepdims=True)
            kept = 1 + np.add.accumulate(acceptance**_LENGTHS, 2)
            drafted = np.empty(kept.shape[1:])
            drafted[:] = _LENGTHS
            return self.num_rows * kept / seconds[:, :, ROUNDS + 1 :], drafted
        # P(a token lies above the bound), P(it does, and is right)
        above = np.minimum(np.add.accumulate(likely[:, :, ::-1], 2)[:, :, ::-1], 1 - 1e-6)
        expected = ((1 - above[..., None] ** _CAPS) / (1 - above[..., None])).reshape(len(above), len(share), -1)
        drafted, kept = expected[0], expected[1:]
        low = drafted.astype(np.int64)  # below `MOST`
        at, flat = low + begins, seconds.reshape(-1)
        rounds = flat.take(at)
        rounds += (drafted - low) * (flat.take(at + 1) - rounds)
        return (1 + above[1:, :, :1] * kept) / rounds, drafted

    def limits(self) -> Floats:
        """`[L - 1]`: tokens per second of all rows by an exit layer that is always right; no draft promises more.

        Of drafts over the part of the vocabulary that is taken on now, by the layers or by copies.
        """
        known = self._known_limits.get(self._way)
        if known is None:
            (first, _), *others = self._at_best()
            limits = self._limits(first)
            for way, deepest in others:
                limits[:deepest] = np.maximum(limits[:deepest], self._limits(way)[:deepest])
            known = self._known_limits[self._way] = self.num_rows * limits
        return known

    def _at_best(self) -> list[tuple[Way, int]]:
        """What limits are of: ways of drafting, and the deepest exit of each; the first one's is the last layer's."""
        (share, by_copies), num_layers = self._way, self._costs.num_layers
        ways = [((1.0 if by_copies else share, False), num_layers - 1)]
        return [*ways, ((share, True), deepest_copy(num_layers))] if self._has_copies else ways

    def _limits(self, way: Way) -> Floats:
        [seconds], _ = self._priced((way,))
        return np.maximum.reduce((1 + _LENGTHS) / seconds[:, ROUNDS + 1 :], 1)

    def _of(self, exit_layer: int) -> list[float]:
        """Seconds of one exit layer, as in `Pieces.table`, in the way of drafting that is taken on."""
        if self._line_for != exit_layer:
            if self._way not in self._by_way:
                self._priced((self._way,))
            self._line, self._line_for = self._by_way[self._way][exit_layer - 1].tolist(), exit_layer
        return self._line

    def lookups(self) -> list[float]:
        """Seconds of rounds that draft 0, 1, 2, .. tokens by lookup in all, for the whole model to verify."""
        known = self._lookups
        if known is None:
            fixed, picks, drafted, _ = self._pieces.lookups
            reading = self._costs.num_layers * (self._more + self._further * drafted)
            seconds = fixed + self._pick * picks + reading + self._deciding
            known = self._lookups = [self.plain_seconds, *(self._slower * seconds).tolist()]
        return known

    @property
    def least_lookup(self) -> float:
        """Seconds of a token drafted by lookup where one is cheapest."""
        if self._least_lookup is None:
            grid = self._pieces.lookups[-1]
            each = (grid[0] + self._pick * grid[1]).tolist()
            steps = zip(each, each[1:], LOOKUP_GRID, LOOKUP_GRID[1:], strict=False)
            least = min((b - a) / (m - n) for a, b, n, m in steps) + self._costs.num_layers * self._further
            self._least_lookup = self._slower * least / self.num_rows
        return self._least_lookup

    def rounds(self, exit_layer: int) -> list[float]:
        """Seconds of rounds in which every row drafts 0..MOST tokens."""
        return self._of(exit_layer)[ROUNDS:]

    def one_more(self, exit_layer: int, drafted: float) -> float:
        """Seconds that one more drafted token per row adds, for each row, to a round of about `drafted` per row."""
        at, line = ROUNDS + min(int(drafted), MOST - 2), self._of(exit_layer)
        return (line[at + 2] - line[at]) / 2 / self.num_rows

    def each(self, exit_layer: int, drafted: float) -> float:
        """The same of each token in the mean, from the first to about the last one."""
        count, line = min(MOST, max(1, math.ceil(drafted))), self._of(exit_layer)
        return (line[ROUNDS + count] - line[ROUNDS]) / count / self.num_rows

    def beside(self, exit_layer: int, drafted: float) -> tuple[float, float]:
        """Seconds that drafting tokens beside the others adds to a round of about `drafted` per row: at all, and each.

        The last pass becomes wider, and verification.
        """
        costs, rows = self._costs, self.num_rows
        wider = self.one_more(exit_layer, drafted) - self._of(exit_layer)[STEP] / rows  # verification, for each
        if self._way[1]:  # copies need not read what is verified
            return 0.0, wider
        narrow, some, many = (costs.wide_pass(exit_layer, rows, rows + n, self._context) for n in (0, 1, 5))
        each = self._passes[False] * (many - some) / 4
        return self._passes[False] * (some - narrow) - each, each + wider


def deepest_copy(num_layers: int) -> int:
    """The deepest exit that copies draft for: more of them would take memory for nothing, so late does not pay."""
    return max(1, num_layers // 2)
