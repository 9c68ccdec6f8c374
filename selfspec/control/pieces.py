"""`Pieces`: what rounds of so many rows are made of, in arrays that a round's price is linear in."""

from __future__ import annotations

import numpy as np

from selfspec.control.costs import LOOKUP_SECONDS, Costs
from selfspec.control.decay import Floats
from selfspec.control.ngram_stats import MOST_FOUND

MOST = 18  # longest draft considered
MOST_PACKED = 256  # drafted by lookup in all: the logits of a round's tokens are held at once
LOOKUP_GRID = (0, 1, 2, 3, 4, 5, 7, 11, 17, 31, 63)  # drafted tokens per row at which lookups are priced
STEP, ROUNDS = 0, 1  # columns of a table, see `Pieces.table`
WIDTH = ROUNDS + MOST + 1
Coefficients = tuple[float, float, float, float, float, float, float, float, float]


class Pieces:
    """Of rounds of `num_rows` rows by these costs; what the clock says beside them comes in with `coefficients`."""

    def __init__(self, costs: Costs, num_rows: int) -> None:
        self._costs, self._num_rows = costs, num_rows
        self.plain = costs.stages(None, (0,) * num_rows)
        self.plain_seconds = sum(self.plain.values())
        self._tables: dict[bool, Floats] = {}
        self._lookups: tuple[Floats, Floats, Floats, Floats] | None = None

    @classmethod
    def of(cls, costs: Costs, num_rows: int) -> Pieces:
        """Made once, whoever asks: an engine often lives for one request only."""
        return costs.remembered(("pieces", num_rows), lambda: cls(costs, num_rows))

    def table(self, copies: bool) -> Floats:
        """`[9, (L - 1) * WIDTH]`: of each coefficient, for every exit layer, seconds in `WIDTH` columns.

        `STEP`: one more drafted token per row, without its verification. `ROUNDS` and on: whole rounds, by drafted
        tokens per row.

        Args:
            copies: copies of the layers draft: they need not read the last token, and all layers verify.
        """
        known = self._tables.get(copies)
        if known is None:
            known = self._tables[copies] = self._make_table(copies)
        return known

    def _make_table(self, copies: bool) -> Floats:
        costs, rows = self._costs, self._num_rows
        exits = np.arange(1, costs.num_layers)[:, None]
        early, first = (
            np.array([[costs.early_pass(e, rows, first=is_first, copies=copies)] for e in range(1, costs.num_layers)])
            for is_first in (False, True)
        )
        tokens = [rows * width for width in range(1, MOST + 2)]
        one_layer = np.array([costs.verify(costs.num_layers - 1, rows, n) for n in tokens])
        verifying = exits * 0 + costs.num_layers if copies else costs.num_layers - exits
        passes = np.arange(MOST + 1) + (not copies)  # by drafted tokens
        table = np.zeros((9, len(exits), WIDTH))
        step, rounds = table[:, :, STEP : STEP + 1], table[:, :, ROUNDS:]
        heads = [costs.whole_head(n, rows) if copies else costs.head(n) for n in tokens]
        rounds[0] = verifying * one_layer + np.array(heads) + costs.rest(rows)
        rounds[1] = [costs.pick(n) for n in tokens]
        step[2], rounds[2] = early, passes * early + first - early
        step[3], rounds[3] = exits, passes * exits
        rounds[4] = verifying
        step[5:7, :, 0] = [[(costs.copies or costs if copies else costs).head(rows)], [costs.pick(rows)]]
        rounds[5:7] = step[5:7] * np.arange(MOST + 1)
        rounds[7] = 1
        rounds[8] = verifying * np.arange(MOST + 1)
        return table.reshape(9, -1)

    @property
    def lookups(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Of rounds by lookup, by drafted tokens in all: what does not change, picks, and drafted tokens per row; and
        the first two on the grid."""
        if self._lookups is None:
            self._lookups = self._make_lookups()
        return self._lookups

    def _make_lookups(self) -> tuple[Floats, Floats, Floats, Floats]:
        rows, costs = self._num_rows, self._costs
        tokens = [rows * (1 + drafted) for drafted in LOOKUP_GRID]
        ragged = costs.ragged(rows) if costs.ragged is not None and rows > 1 else 1.0
        layers = max(1.0, ragged) * np.array([costs.verify(0, rows, n) for n in tokens])
        rest = np.array([costs.whole_head(n, rows) for n in tokens]) + costs.rest(rows) + rows * LOOKUP_SECONDS
        grid = np.stack((layers + rest, np.array([costs.pick(n) for n in tokens])))
        drafted = np.arange(1, min(rows * MOST_FOUND, MOST_PACKED) + 1) / rows
        fixed, picks = (np.interp(drafted, LOOKUP_GRID, each) for each in grid)
        return fixed, picks, drafted, grid


def coefficients(
    pick: float, passes: float, share: float, more: float, further: float, deciding: float
) -> Coefficients:
    """What the rows of `Pieces.table` are multiplied by.

    Args:
        pick: how much longer picks take than in the table of costs, and `passes`: early passes.
        share: of the vocabulary that is drafted over.
        more: seconds that every layer takes longer for the tokens in its cache, in a pass of one token per row.
        further: and for every further token of all rows in a pass.
        deciding: seconds of every round that drafts.
    """
    return 1.0, pick, passes, passes * more, more, share, share * pick, deciding, further
