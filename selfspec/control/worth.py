"""What a draft is worth: expected tokens per second, for every exit layer and every confidence to stop at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from selfspec.control.costs import CONTEXT, LOOKUP_SECONDS, Costs
from selfspec.control.matches import MOST_FOUND
from selfspec.control.tracker import Floats

MOST = 18  # longest draft considered
MOST_PACKED = 256  # drafted by lookup in all: the logits of a round's tokens are held at once
LOOKUP_GRID = (0, 1, 2, 3, 4, 5, 7, 11, 17, 31, 63)  # drafted tokens per row at which lookups are priced
MOST_GUESSES = 7  # checked by an early pass
NOTICEABLE = 0.05  # smaller changes are not worth pricing everything anew
CAPS = (1, 2, 3, 4, 6, 9, 13, MOST)  # tokens after which a row's draft may be taken to end
_LENGTHS, _CAPS = np.arange(1.0, MOST + 1), np.array(CAPS, np.float64)


@dataclass
class Priced:
    """Rounds that layers draft in, in one way of drafting.

    Attributes:
        step: `[L - 1, 1]`: seconds of one more drafted token per row, without its verification.
        begin: `[L - 1, 1]`: what the round's first early pass takes beside, and the one that feeds the last token.
        verify: `[L - 1, MOST + 1]`: everything else of a round, by drafted tokens per row.
    """

    step: Floats
    begin: Floats
    verify: Floats

    @cached_property
    def rounds(self) -> Floats:
        """`[L - 1, MOST]`: rounds of drafts of every length."""
        return self.step * _LENGTHS + self.begin + self.verify[:, 1:]

    @cached_property
    def limits(self) -> Floats:
        """`[L - 1]`: tokens per second and row by an exit layer that is always right; no draft promises more."""
        return np.maximum.reduce((1 + _LENGTHS) / self.rounds, 1)


class Worth:
    """Costs of a round of `num_rows` rows, the longest of `context` tokens, in arrays, and what they say of drafts.

    One row's draft is taken to go on while its tokens' bins of confidence lie above a bound, and at most for a number
    of tokens, each independently of those before it; it stops after the first token below. Several rows are taken to
    stop together, after a number of tokens.
    """

    def __init__(self, costs: Costs, num_rows: int, context: float = CONTEXT) -> None:
        exits = np.arange(1, costs.num_layers)
        self.num_rows, self._costs = num_rows, costs
        self._has_copies = costs.copies is not None
        # By whether copies draft: [L - 1, 1] of each
        self._early = [_passes(costs, num_rows, False, copies) for copies in (False, True)]
        self._first = [_passes(costs, num_rows, True, copies) for copies in (False, True)]
        self._step_heads = costs.head(num_rows), (costs.copies or costs).head(num_rows)
        self.step_pick = costs.pick(num_rows)
        tokens = [num_rows * width for width in range(1, MOST + 2)]
        one_layer = np.array([costs.verify(costs.num_layers - 1, num_rows, n) for n in tokens])
        self._above = (costs.num_layers - exits)[:, None]  # [L - 1, 1]: layers that verify
        self._below = exits[:, None]
        self.pick = np.array([costs.pick(n) for n in tokens])
        self.rest = costs.rest(num_rows)
        heads = np.array([costs.head(n) for n in tokens])
        late = heads + self.rest  # without layers and picks
        # [L - 1, MOST + 1]; and [MOST + 1]: copies are verified by all layers
        self._late = self._above * one_layer + late, costs.num_layers * one_layer + late
        self.plain = costs.stages(None, (0,) * num_rows)
        self._plain = sum(self.plain.values())
        self._lookup_tables: tuple[Floats, Floats, Floats] | None = None  # see `_price_lookups`
        self._lines = np.arange(costs.num_layers - 1)[:, None] * (MOST + 1)  # where they begin in `_verify`
        self._wider: dict[int, list[float]] = {}  # what `guesses` knows of exit layers
        self._pick, self._passes, self._deciding = 1.0, (1.0, 1.0), 0.0
        self._part, self._copies = 1.0, False
        self._slower = 1.0  # rounds by lookup
        self._lookups: list[float] | None = None
        self.move(context)

    def move(self, context: float) -> None:
        """Take on that the longest row has `context` tokens: every layer of a pass then reads as much more."""
        self._more = self.num_rows * self._costs.context * max(0.0, context - CONTEXT)  # seconds a layer
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
            self._slower, self._lookups = lookups, None
        near = abs(deciding - self._deciding) < NOTICEABLE * self.plain_seconds
        ratios = zip((pick, *passes), (self._pick, *self._passes), strict=True)
        if near and all(abs(new / old - 1) < NOTICEABLE for new, old in ratios):
            return
        self._pick, self._passes, self._deciding = pick, passes, deciding
        self._price()
        self._wider.clear()

    def draft_by(self, share: float, copies: bool = False) -> None:
        """Take on that drafts are picked among a share of the vocabulary, with a head as much smaller, or by copies."""
        if (share, copies) != (self._part, self._copies):
            self._part, self._copies = share, copies
            self._wider.clear()

    def _price(self) -> None:
        """Arrays follow when they are asked for: a context may move, and prices change, several times before."""
        self.plain_seconds = self._plain + self._costs.num_layers * self._more + (self._pick - 1) * self.plain["pick"]
        self._lookups = None
        self._known: dict[tuple[float, bool], Priced] = {}

    @property
    def _now(self) -> Priced:
        """In the way of drafting that is taken on."""
        return self._priced(self._part, self._copies)

    def _priced(self, share: float, copies: bool) -> Priced:
        """The last drafted token runs through early layers too, without a head; copies need not, nor do others run."""
        known = self._known.get((share, copies))
        if known is None:
            read, verifying = self._below * self._more, self._costs.num_layers if copies else self._above
            verify = self._late[copies] + verifying * self._more + (self._pick * self.pick + self._deciding)
            passes, early, first = self._passes[copies], self._early[copies] + read, self._first[copies] + read
            step = passes * early + share * (self._step_heads[copies] + self._pick * self.step_pick)
            begin = passes * (first - early if copies else first)
            verify = np.broadcast_to(verify, (len(step), MOST + 1)) if copies else verify
            known = self._known[share, copies] = Priced(step, begin, verify)
        return known

    def rates(self, right: Floats, share: Floats) -> tuple[Floats, Floats]:
        """(tokens per second of all rows, drafted tokens per row), `[L - 1, ways to stop]`.

        Of one row, the ways are to stop below each bin or after some number of tokens, whichever comes first, since
        some models are as sure of every token; of several, after each number of tokens.
        """
        if self.num_rows > 1:
            acceptance = (right * share).sum(1, keepdims=True)
            kept = 1 + (acceptance**_LENGTHS).cumsum(1)
            return self.num_rows * kept / self._now.rounds, np.broadcast_to(_LENGTHS, kept.shape)
        above = np.empty((2, *share.shape))
        above[0] = share
        np.multiply(right, share, out=above[1])
        # P(a token lies above the bound), P(it does, and is right)
        above = np.minimum(np.add.accumulate(above[:, :, ::-1], 2)[:, :, ::-1], 1 - 1e-6)
        expected = (1 - above[..., None] ** _CAPS) / (1 - above[..., None])
        drafted, kept = expected.reshape(2, len(share), -1)
        low = np.minimum(drafted.astype(np.int64), MOST - 1)
        now = self._now
        at, verify = low + self._lines, now.verify.reshape(-1)
        verifying = verify.take(at)
        verifying += (drafted - low) * (verify.take(at + 1) - verifying)
        return (1 + above[1][:, :1] * kept) / (drafted * now.step + now.begin + verifying), drafted

    def limits(self) -> Floats:
        """`[L - 1]`: tokens per second of all rows by an exit layer that is always right; no draft promises more."""
        limits = self._priced(1.0 if self._copies else self._part, False).limits
        if self._has_copies:
            half, copied = deepest_copy(self._costs.num_layers), self._priced(self._part, True).limits
            limits = np.concatenate((np.maximum(limits[:half], copied[:half]), limits[half:]))
        return self.num_rows * limits

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
        line, now = exit_layer - 1, self._now
        return [float(now.begin[line, 0] + now.verify[line, 0]), *now.rounds[line].tolist()]

    def one_more(self, exit_layer: int, drafted: float) -> float:
        """Seconds that one more drafted token per row adds, for each row, to a round of about `drafted` per row."""
        line, at, now = exit_layer - 1, min(int(drafted), MOST - 2), self._now
        wider = (now.verify[line, at + 2] - now.verify[line, at]) / 2
        return float(now.step[line, 0] + wider) / self.num_rows

    def beside(self, exit_layer: int, drafted: float) -> tuple[float, float]:
        """Seconds that drafting tokens beside the others adds to a round of about `drafted` per row: at all, and each.

        The last pass becomes wider, and verification.
        """
        line, costs, rows, verify = exit_layer - 1, self._costs, self.num_rows, self._now.verify
        at = min(int(drafted), MOST - 2)
        wider = float(verify[line, at + 2] - verify[line, at]) / (2 * rows)
        if self._copies:  # which need not read what is verified
            return 0.0, wider
        narrow, some, many = (costs.wide_pass(exit_layer, rows, rows + n) for n in (0, 1, 5))
        each = self._passes[False] * (many - some) / 4
        return self._passes[False] * (some - narrow) - each, each + wider

    def guesses(self, exit_layer: int, chances: Sequence[float]) -> int:
        """How many free guesses an early pass of a single row had best check; 0: none are worth it, or copies draft.

        Args:
            chances: that the exit picks the first guess, the first two, ...; falling.
        """
        if self._copies:
            return 0
        wider = self._wider.get(exit_layer)
        if wider is None:
            wider = self._wider[exit_layer] = self._widths(exit_layer)
        step = float(self._now.step[exit_layer - 1, 0])
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
            picking = costs.head(1 + n) - self._step_heads[False] + self._pick * (costs.pick(1 + n) - self.step_pick)
            wider.append(self._passes[False] * (costs.wide_pass(exit_layer, 1, 1 + n) - narrow) + self._part * picking)
        return wider


def deepest_copy(num_layers: int) -> int:
    """The deepest exit that copies draft for: more of them would take memory for nothing, so late does not pay."""
    return max(1, num_layers // 2)


def _passes(costs: Costs, num_rows: int, first: bool, copies: bool) -> Floats:
    """`[L - 1, 1]`: early passes by exit layer."""
    exits = range(1, costs.num_layers)
    return np.array([[costs.early_pass(e, num_rows, first=first, copies=copies)] for e in exits])
