"""`Readings`: the timings of the parts of rounds, and the `Costs` that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from selfspec.control.costs import Copies, Costs, Table
from selfspec.core import LOOKUP

LOW = 1 / 8  # the quantile of `low`
MOST_OF_MEDIAN = 4.0  # `mean` caps readings at this multiple of the median
TICK = 1e-9  # smallest reading, so that quotients are finite
REST = 3e-5  # seconds of Python code per round and row
ROW, MANY = 8e-6, 64  # seconds per row beyond the measured batch sizes with many rounds per call; rows up to there
MOST_SHORT = 1.25  # largest factor by which parts of a forward are scaled up to the whole


def low(readings: Sequence[float]) -> float:
    """A low quantile of ascending readings, for tables that decisions use.

    Other processes only make readings longer, and long parts more often than short ones, so that medians of parts
    would not be comparable.
    """
    return readings[min(int(len(readings) * LOW), (len(readings) - 1) // 2)]


def mean(readings: Sequence[float]) -> float:
    """The mean of ascending readings, without extremes, for predicting the time of long runs."""
    most = MOST_OF_MEDIAN * readings[(len(readings) - 1) // 2]
    return sum([min(one, most) for one in readings]) / len(readings)


class Readings:
    """Timings of the parts of rounds ("pieces"), several of each.

    Args:
        counts: reduces the ascending readings of a piece to one value: `low` or `mean`.
    """

    def __init__(self, counts: Callable[[Sequence[float]], float] = low) -> None:
        self._counts = counts
        self._taken: dict[tuple[str, int, int], list[float]] = {}  # (piece, rows, size) -> seconds

    def keep(self, piece: str, rows: int, size: int, seconds: float) -> None:
        """Add a reading. `size`: the argument of the table, which is an exit layer or a number of tokens."""
        self._taken.setdefault((piece, rows, size), []).append(seconds)

    def costs(self, layers: int, middle: int, beyond: int) -> Costs:
        """Make the cost table.

        Args:
            layers: number of layers of the model.
            middle: the exit layer of the timed verifications.
            beyond: additional cached tokens of "long" passes; 0: there were none.
        """
        late = {r: {w: s / (layers - middle) for w, s in t.items()} for r, t in self.typical("late").items()}
        plain = self._plain()
        reading = self._reading(layers, middle, beyond) if beyond else {}
        costs = Costs(
            layers,
            plain=Table.of({rows: of_one[1] for rows, of_one in plain.items()}),
            first={rows: Table.of(by_exit) for rows, by_exit in self.typical("first").items()},
            early={rows: Table.of(by_exit) for rows, by_exit in self.typical("early").items()},
            late={rows: Table.of(by_width) for rows, by_width in late.items()},
            head=Table.of(self.typical("head")[1]),
            pick=Table.of(self.typical("pick")[1]),
            rest=self._rest(),
            short=Table.of(self.typical("short")[1]),
            copies=self._copies(),
            plain_head=Table.of(heads[1]) if (heads := self.typical("plain head")) else None,
            **reading,
        )
        if self._counts is low:
            costs = _scale_to_whole(costs, middle)
        # A ragged round is timed alone in its call, so it is compared with plain rounds timed likewise.
        single = self.typical("single")
        factors = {
            rows: seconds / costs.verify(LOOKUP, rows, num_tokens) * min(1.0, costs.plain(rows) / single[rows][1])
            for rows, of_rows in self.typical("ragged").items()
            for num_tokens, seconds in of_rows.items()
        }
        return replace(costs, ragged=Table.of(factors)) if factors else costs

    def _reading(self, layers: int, middle: int, beyond: int) -> dict[str, Any]:
        """`Costs.context`, `contexts`, `context_width`, `context_widths` and `padding`."""
        plain, late, by_width = self.typical("plain"), self.typical("late")[1], 0.0
        context = max(0.0, self.typical("long")[1][1] - plain[1][1]) / beyond / layers
        for width, seconds in self.typical("long late").get(1, {}).items():
            of_all = (seconds - late[width]) / beyond / (layers - middle)
            by_width = max(0.0, of_all - context) / (width - 1)
        more = {
            rows: {longer: max(0.0, seconds - plain[rows][1]) for longer, seconds in of_rows.items()}
            for rows, of_rows in self.typical("longer").items()
        }
        return {
            "context": context,
            "contexts": {
                rows: Table.of({0: 0.0, **{longer: seconds / layers / rows for longer, seconds in of_rows.items()}})
                for rows, of_rows in more.items()
            },
            "context_width": by_width,
            "context_widths": self._widths(layers, middle, by_width, more),
            "padding": self._padding(more),
        }

    def _widths(self, layers: int, middle: int, alone: float, more: Mapping[int, Mapping[int, float]]) -> Table | None:
        """`Costs.context_widths`, from verifications at the longest contexts of `more` (see `_padding`)."""
        late, by_rows = self.typical("late"), {}
        for rows, of_rows in self.typical("longer late").items():
            longest = max(more[rows])
            for width, seconds in of_rows.items():
                further = (seconds - late[rows][width]) / (layers - middle) - more[rows][longest] / layers
                by_rows[rows] = max(0.0, further) / longest / rows / (width - 1)
        return Table.of({1: alone, **by_rows}) if by_rows else None

    def _padding(self, more: Mapping[int, Mapping[int, float]]) -> float:
        """`Costs.padding`, from forwards in which only every second row is longer.

        Args:
            more: by rows and additional cached tokens: extra seconds of a forward where all rows are longer.
        """
        plain, of_all, of_half, least = self.typical("plain"), 0.0, 0.0, 0.0
        for rows, of_rows in self.typical("uneven").items():
            for longer, seconds in of_rows.items():
                of_all += more[rows][longer]
                of_half += seconds - plain[rows][1]
                least += rows // 2 / rows * more[rows][longer]  # each row read up to its own length
        return min(max((of_half - least) / (of_all - least), 0.0), 1.0) if of_all > least else 1.0

    def _plain(self) -> dict[int, dict[int, float]]:
        """By rows: {1: seconds} of a plain forward, at most those of a forward in two parts."""
        plain = self.typical("plain")
        halves = self.typical("halves") if self._counts is low else {}
        return {rows: {1: min([of_one[1], *halves.get(rows, {}).values()])} for rows, of_one in plain.items()}

    def _rest(self) -> Table:
        """The overhead of a plain round, by rows."""
        around = {rows: of_one[1] for rows, of_one in self.typical("around").items()}
        if around:
            last = max(around)
            return Table.of({**around, last + MANY: around[last] + MANY * ROW})
        single = Table.of({rows: of_one[1] for rows, of_one in self.typical("rest").items()} or {1: 0.0})
        return Table.of({rows: REST * (1 + rows) + single(rows) for rows in (1, *single.points, MANY)})

    def _copies(self) -> Copies | None:
        first, later = (
            {rows: Table.of(by_exit) for rows, by_exit in self.typical(f"copied {which}").items()}
            for which in ("first", "later")
        )
        return Copies(first, later, Table.of(self.typical("copied head")[1])) if first else None

    def typical(self, piece: str) -> dict[int, dict[int, float]]:
        """Seconds of a piece by rows and size. Readings that are not positive are dropped."""
        found: dict[int, dict[int, float]] = {}
        for (name, rows, size), seconds in self._taken.items():
            if name == piece:
                real = sorted(s for s in seconds if s >= TICK) or [TICK]
                found.setdefault(rows, {})[size] = self._counts(real)
        return found


def _scale_to_whole(costs: Costs, middle: int) -> Costs:
    """Scale the tables of early passes and verifications so that they add up to a plain forward.

    On a machine with varying speed, the low quantiles of the parts add up to less than that of the whole, so that
    drafts would look cheaper than they are.

    Args:
        middle: the exit layer of the timed verifications.
    """
    copies = costs.copies
    short = {}
    for rows in costs.late:
        parts = costs.early_pass(middle, rows, first=True) + costs.verify(middle, rows, rows)
        short[rows] = min(max(1.0, costs.plain(rows) / max(parts, TICK)), MOST_SHORT)

    def scaled(tables: Mapping[int, Table]) -> dict[int, Table]:
        return {rows: table.scaled(short.get(rows, 1.0)) for rows, table in tables.items()}

    if copies is not None:
        copies = replace(copies, first=scaled(copies.first), early=scaled(copies.early))
    first, early, late = scaled(costs.first), scaled(costs.early), scaled(costs.late)
    return replace(costs, first=first, early=early, late=late, copies=copies)
