"""`Costs`: calibrated seconds of rounds on a machine.

A `Table` has measured seconds by a number of tokens, rows or layers. Values between measured points are interpolated
linearly; beyond the last point the last slope continues. No curve is fitted over the whole range, since real costs have
steps (arXiv 2310.18813).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from selfspec.core import LOOKUP


@dataclass(frozen=True, slots=True)
class Table:
    """Seconds at measured points, ascending in both."""

    points: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in zip(self.points, self.points[1:], strict=False))
        if not self.points or len(self.points) != len(self.seconds) or not rises:
            raise ValueError(f"a table needs ascending points, one value each, got {self.points} and {self.seconds}")
        falls = any(a > b for a, b in zip(self.seconds, self.seconds[1:], strict=False))
        if falls or not all(0 <= s < float("inf") for s in self.seconds):
            raise ValueError(f"a table's seconds must be finite, not negative and ascending, got {self.seconds}")

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> Table:
        """Make a table of measurements; where noise makes them fall, neighbours are pooled (isotonic regression)."""
        points = sorted(measured)
        pools: list[list[float]] = []  # [mean, how many]
        for point in points:
            pools.append([measured[point], 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                mean, count = pools.pop()
                before = pools[-1]
                pools[-1] = [(before[0] * before[1] + mean * count) / (before[1] + count), before[1] + count]
        return cls(tuple(points), tuple(mean for mean, count in pools for _ in range(int(count))))

    def __call__(self, at: float) -> float:
        points, seconds = self.points, self.seconds
        if at <= points[0] or len(points) == 1:
            return seconds[0]
        i = min(bisect_left(points, at), len(points) - 1)  # beyond the last point: the last slope
        share = (at - points[i - 1]) / (points[i] - points[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def scaled(self, factor: float) -> Table:
        return Table(self.points, tuple(s * factor for s in self.seconds))

    @classmethod
    def read(cls, given: Mapping[str, float]) -> Table:
        """Read what `as_dict` returned."""
        return cls(tuple(int(p) for p in given), tuple(float(s) for s in given.values()))

    def as_dict(self) -> dict[str, float]:
        """Seconds by point, for a profile file."""
        return {str(p): s for p, s in zip(self.points, self.seconds, strict=True)}


ByRows = Mapping[int, Table]


def _written(tables: ByRows) -> dict[str, dict[str, float]]:
    return {str(rows): table.as_dict() for rows, table in tables.items()}


def _read_by_rows(given: Mapping[str, Mapping[str, float]]) -> dict[int, Table]:
    tables = {int(rows): Table.read(table) for rows, table in given.items()}
    if 1 not in tables:
        raise ValueError("the table of a single row is missing")
    return tables


def between_rows(tables: ByRows, num_rows: int, at: float) -> float:
    """A table's value at `at`, linear between measured numbers of rows; beyond the last, its slope continues."""
    rows = sorted(tables)
    if num_rows <= rows[0] or len(rows) == 1:
        return tables[rows[0]](at)
    i = min(bisect_left(rows, num_rows), len(rows) - 1)
    low = tables[rows[i - 1]](at)
    high = max(low, tables[rows[i]](at))  # more rows never take less time
    return low + (num_rows - rows[i - 1]) / (rows[i] - rows[i - 1]) * (high - low)


class Copies(NamedTuple):
    """Draft steps by 4-bit copies of layers and head; the fields are those of `Costs`."""

    steps: ByRows
    head: Table


class RoundLimits(NamedTuple):
    """Limits of rounds from recordings (CUDA graphs).

    Such a round takes the time of its planned draft lengths, wherever drafts stop, and of a number of rows that is a
    power of two.
    """

    longest: int  # maximum drafted tokens of a row
    tokens: int  # maximum tokens of a verification, over all rows
    rows: int  # maximum rows

    def draft_length(self, num_rows: int) -> int:
        """The maximum drafted tokens of each of these rows."""
        slots = 1 << (num_rows - 1).bit_length()
        return min(self.longest, self.tokens // slots - 1)


CONTEXT = 64  # cached tokens per row up to which the tables hold as they are
LOOKUP_SECONDS = 1e-5  # seconds of one row's draft by lookup


@dataclass(frozen=True)
class Costs:
    """Seconds of whole rounds, and of draft steps. Mappings are keyed by the number of rows in the batch.

    Attributes:
        rounds: a round that runs all layers, by tokens per row; with one token it is a plain round.
        steps: a draft step over one token per row (early layers, head and pick), by number of layers.
        head: head and pick, by tokens.
        context: by rows: what a cached token of every row beyond `CONTEXT` adds to a plain round.
        width: share of it that every token of a row after its first adds in the same pass.
        shadow: shadow picks over a shortlist of the vocabulary, by positions times layers.
        copies: drafting by 4-bit copies of the layers; None: there are none.
        recorded: limits of rounds from recordings; None: rounds are run operation by operation.
    """

    num_layers: int
    rounds: ByRows
    steps: ByRows
    head: Table
    context: Table
    shadow_picks: Table
    width: float = 0.0
    copies: Copies | None = None
    recorded: RoundLimits | None = None
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What users of these costs computed from them once."""

    def recorded_length(self, num_rows: int) -> int | None:
        """The maximum draft length of recorded rounds, 0 for more rows than are recorded; None: rounds are not."""
        if self.recorded is None:
            return None
        return self.recorded.draft_length(num_rows) if num_rows <= self.recorded.rows else 0

    def plain_round(self, num_rows: int, context: float = CONTEXT) -> float:
        """Seconds of a round of plain decoding of rows with `context` cached tokens each."""
        return between_rows(self.rounds, num_rows, 1) + self.reading(num_rows, context)

    def round(self, *shape: Any, **options: Any) -> float:
        """Seconds of a whole round; the arguments are those of `stages`."""
        return sum(self.stages(*shape, **options).values())

    def stages(
        self,
        exit_layer: int | None,
        lengths: Sequence[int],
        context: float = CONTEXT,
        draft_share: float = 1.0,
        copies: bool = False,
    ) -> dict[str, float]:
        """Seconds by stage (draft, verify) of a round in which row i drafts `lengths[i]` tokens.

        A round by lookup in which no row drafts is a plain round.

        Args:
            context: cached tokens per row.
            draft_share: share of the vocabulary that drafts are over. Their head and picks take this share of the time.
            copies: 4-bit copies draft, and all layers verify.
        """
        rows, tokens = len(lengths), sum(lengths) + len(lengths)
        if exit_layer is None or exit_layer == LOOKUP:
            draft = 0.0 if exit_layer is None else rows * LOOKUP_SECONDS
            return {"draft": draft, "verify": self.verify(LOOKUP, rows, tokens, context)}
        by_copies = copies and self.copies is not None
        draft = sum(
            steps * self.step(exit_layer, live, context, draft_share, by_copies)
            for live, steps in _active_rows(lengths)
        )
        if by_copies:  # which do not run over the last drafted token
            return {"draft": draft, "verify": self.verify(LOOKUP, rows, tokens, context)}
        draft += self.step(exit_layer, rows, context, 0.0)
        return {"draft": draft, "verify": self.verify(exit_layer, rows, tokens, context)}

    def step(
        self, exit_layer: int, num_rows: int, context: float = CONTEXT, draft_share: float = 1.0, copies: bool = False
    ) -> float:
        """Seconds of a draft step over one token per row; with a `draft_share` of 0 it has no head."""
        steps, head = (self.copies.steps, self.copies.head) if copies and self.copies else (self.steps, self.head)
        whole = between_rows(steps, num_rows, exit_layer) - (1 - draft_share) * head(num_rows)
        return max(0.0, whole) + exit_layer / self.num_layers * self.reading(num_rows, context)

    def withdrawal(
        self, exit_layer: int, num_rows: int, context: float = CONTEXT, draft_share: float = 1.0, copies: bool = False
    ) -> float:
        """Seconds that a further drafted token per row, which is not verified, adds to a round."""
        without = 0.0 if copies else self.step(exit_layer, num_rows, context, 0.0)  # layers run over the last token
        return self.step(exit_layer, num_rows, context, draft_share, copies) - without

    def verify(self, exit_layer: int, num_rows: int, num_tokens: float, context: float = CONTEXT) -> float:
        """Seconds of the layers from `exit_layer` on, head and picks over `num_tokens` tokens in all."""
        width, share = num_tokens / num_rows, 1 - exit_layer / self.num_layers
        whole, head = between_rows(self.rounds, num_rows, width), self.head(num_tokens)
        return share * max(0.0, whole - head) + min(head, whole) + share * self.reading(num_rows, context, width)

    def reading(self, num_rows: int, context: float, width: float = 1.0) -> float:
        """Extra seconds of all layers for reading the cached tokens beyond `CONTEXT`; width: tokens per row."""
        return max(0.0, context - CONTEXT) * self.context(num_rows) * (1 + self.width * (width - 1))

    def shadow(self, num_layers: int, num_positions: int, exact: bool = False) -> float:
        """Seconds of shadow picks of `num_layers` layers at `num_positions` positions."""
        tokens = num_layers * num_positions
        return 0.0 if not tokens else self.head(tokens) if exact else self.shadow_picks(tokens)

    def seed(self, num_layers: int, num_positions: int) -> float:
        """Seconds of probing a prompt at its last positions: the model's logits and shadow picks."""
        return self.head(num_positions) + self.shadow(num_layers, num_positions) if num_layers else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields as plain numbers, for a profile file."""
        tables = {name: getattr(self, name).as_dict() for name in _TABLES}
        copies = None
        if self.copies is not None:
            copies = {"steps": _written(self.copies.steps), "head": self.copies.head.as_dict()}
        return {
            "num_layers": self.num_layers,
            **{name: _written(getattr(self, name)) for name in _BY_ROWS},
            **tables,
            "width": self.width,
            "copies": copies,
            "recorded": self.recorded and list(self.recorded),
        }

    @classmethod
    def from_dict(cls, given: Any) -> Costs:
        """Read what `as_dict` returned.

        Raises:
            ValueError: `given` is something else.
        """
        try:
            fields: dict[str, Any] = {name: _read_by_rows(given[name]) for name in _BY_ROWS}
            fields |= {name: Table.read(given[name]) for name in _TABLES}
            fields["width"] = float(given["width"])
            if not 0 <= fields["width"] <= 1e9:
                raise ValueError(f"width must lie in 0..1e9, got {fields['width']}")
            if (copies := given.get("copies")) is not None:
                fields["copies"] = Copies(_read_by_rows(copies["steps"]), Table.read(copies["head"]))
            if given.get("recorded") is not None:
                fields["recorded"] = RoundLimits(*[int(limit) for limit in given["recorded"]])
                if min(fields["recorded"]) < 1:
                    raise ValueError(f"limits of recorded rounds must be at least 1, got {given['recorded']}")
            return cls(int(given["num_layers"]), **fields)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as problem:
            raise ValueError(f"not a table of costs: {problem}") from problem


_BY_ROWS, _TABLES = ("rounds", "steps"), ("head", "context", "shadow_picks")


def _active_rows(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (number of rows that still draft, number of steps for which they all do), in the order of steps."""
    before = 0
    for ended, length in enumerate(sorted(lengths)):
        if length > before:
            yield len(lengths) - ended, length - before
            before = length
