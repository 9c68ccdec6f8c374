"""`Costs`: the seconds of rounds on this machine, from measured tables of their parts.

A `Table` has measured seconds by a number of tokens, rows or layers. Values between measured points are interpolated
linearly; beyond the last point the last slope continues. No curve is fitted over the whole range, since real costs have
steps (arXiv 2310.18813).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from selfspec.core import LOOKUP

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Table:
    """Seconds at measured points, ascending in both."""

    points: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in zip(self.points, self.points[1:], strict=False))
        if not self.points or len(self.points) != len(self.seconds) or not rises:
            raise ValueError(f"a table needs ascending points, one value each, got {self.points} and {self.seconds}")
        if not all(0 <= s < float("inf") for s in self.seconds):
            raise ValueError(f"a table's seconds must be finite and not negative, got {self.seconds}")

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


def written(tables: Mapping[int, Table]) -> dict[str, dict[str, float]]:
    """Tables by number of rows, for a profile file."""
    return {str(rows): table.as_dict() for rows, table in tables.items()}


def read_by_rows(given: Mapping[str, Mapping[str, float]]) -> dict[int, Table]:
    """Read what `written` returned."""
    return {int(rows): Table.read(table) for rows, table in given.items()}


@dataclass(frozen=True)
class Copies:
    """Costs of drafts by 4-bit copies of layers and head; the fields are those of `Costs`."""

    first: Mapping[int, Table]
    early: Mapping[int, Table]
    head: Table

    def as_dict(self) -> dict[str, Any]:
        return {"first": written(self.first), "early": written(self.early), "head": self.head.as_dict()}

    @classmethod
    def from_dict(cls, given: Any) -> Copies:
        first, early = read_by_rows(given["first"]), read_by_rows(given["early"])
        if not (1 in first and 1 in early):
            raise ValueError("tables of copies for a single row are missing")
        return cls(first, early, Table.read(given["head"]))


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


CONTEXT = 64  # cached tokens per row up to which the tables hold without a correction
LOOKUP_SECONDS = 1e-5  # seconds of one row's draft by lookup
_TABLES, _BY_ROWS = ("plain", "head", "pick", "rest", "short"), ("first", "early", "late", "contexts")
_OPTIONAL, _NUMBERS = ("context_widths", "ragged", "plain_head"), ("context", "context_width", "padding")


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round. Mappings are keyed by the number of rows in the batch.

    Attributes:
        plain: a forward of all layers over one token per row, by rows.
        early: by rows: an early pass over one token per row, by its number of layers.
        first: the same for the first pass of a round, when the processor's caches hold later layers; empty: as `early`.
        late: by rows: one layer of a verification, by tokens per row.
        head: final norm and vocabulary product, by tokens.
        plain_head: the same after a plain forward, by rows, when the processor's caches do not hold the head; None: as
            `head`.
        pick: picking tokens and copying them to the host, by tokens.
        rest: everything else in a round, by rows.
        short: shadow picks over a shortlist of the vocabulary, by positions times layers.
        context: one layer's extra seconds per row and cached token beyond `CONTEXT`, for a single row.
        contexts: by rows: one layer's extra seconds per row, by cached tokens beyond `CONTEXT`. Beyond the last point
            seconds are proportional to tokens; beyond the largest number of rows, to rows. Empty: as `context`.
        context_width: a layer's further seconds per row and such cached token, for every token of a row in the pass
            after its first, for a single row.
        context_widths: the same for several rows, by their number; None: as `context_width`.
        padding: 1 where every row's keys are read up to the longest row's length, 0 where only up to its own length;
            values between are measured mixtures.
        ragged: by rows: factor on `late` where few rows have many tokens and the others one. About 1 where tokens are
            packed, up to 2 where attention pads to the longest row; None: not measured.
        copies: drafting by 4-bit copies of the layers; None: there are none.
        recorded: limits of rounds from recordings; None: rounds are run operation by operation.
    """

    num_layers: int
    plain: Table
    early: Mapping[int, Table]
    late: Mapping[int, Table]
    head: Table
    pick: Table
    rest: Table
    short: Table
    context: float = 0.0
    contexts: Mapping[int, Table] = field(default_factory=dict)
    context_width: float = 0.0
    context_widths: Table | None = None
    padding: float = 1.0
    first: Mapping[int, Table] = field(default_factory=dict)
    ragged: Table | None = None
    copies: Copies | None = None
    plain_head: Table | None = None
    recorded: RoundLimits | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def recorded_length(self, num_rows: int) -> int | None:
        """The maximum draft length of recorded rounds, 0 for more rows than are recorded; None: rounds are not."""
        if self.recorded is None:
            return None
        return self.recorded.draft_length(num_rows) if num_rows <= self.recorded.rows else 0

    def plain_round(self, num_rows: int, context: float = CONTEXT) -> float:
        """Seconds of a round of plain decoding."""
        return self.round(None, (0,) * num_rows, context)

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
        """Seconds by stage (draft, verify, head, pick, rest) of a round in which row i drafts `lengths[i]` tokens.

        A round by lookup in which no row drafts is a plain round.

        Args:
            context: cached tokens per row, see `context_of`.
            draft_share: share of the vocabulary that drafts are over. Their head and picks take this share of the time.
            copies: 4-bit copies draft, and all layers verify.
        """
        rows, tokens = len(lengths), sum(lengths) + len(lengths)
        draft = head = pick = 0.0
        judging = self.verify_head(tokens, rows)
        if exit_layer is None or (exit_layer == LOOKUP and tokens == rows):
            draft = 0.0 if exit_layer is None else rows * LOOKUP_SECONDS
            verify = self.plain(rows) + self.num_layers * self.reading(rows, context)
        elif exit_layer == LOOKUP:
            draft, verify = rows * LOOKUP_SECONDS, self.verify(LOOKUP, rows, tokens, context)
        elif copies and self.copies is not None:
            draft, head, pick = self._by_copies(self.copies, exit_layer, lengths, context)
            verify = self.verify(LOOKUP, rows, tokens, context)
        else:
            draft, head, pick = self._by_layers(exit_layer, lengths, context)
            verify, judging = self.verify(exit_layer, rows, tokens, context), self.head(tokens)
        head, pick = draft_share * head + judging, draft_share * pick + self.pick(tokens)
        return {"draft": draft, "verify": verify, "head": head, "pick": pick, "rest": self.rest(rows)}

    def _by_layers(self, exit_layer: int, lengths: Sequence[int], context: float) -> tuple[float, float, float]:
        """Seconds of early passes, heads and picks. The last drafted token runs through the early layers, too."""
        draft, head, pick = self.early_pass(exit_layer, len(lengths), context, True), 0.0, 0.0
        for live, steps in _active_rows(lengths):
            draft += steps * self.early_pass(exit_layer, live, context)
            head, pick = head + steps * self.head(live), pick + steps * self.pick(live)
        return draft, head, pick

    def _by_copies(
        self, copies: Copies, exit_layer: int, lengths: Sequence[int], context: float
    ) -> tuple[float, float, float]:
        """Seconds of the same stages by 4-bit copies, which do not run over the last drafted token."""
        draft = head = pick = 0.0
        for i, (live, steps) in enumerate(_active_rows(lengths)):
            first = i == 0
            draft += (steps - first) * self.early_pass(exit_layer, live, context, copies=True)
            draft += first * self.early_pass(exit_layer, live, context, True, True)
            head, pick = head + steps * copies.head(live), pick + steps * self.pick(live)
        return draft, head, pick

    def shadow(self, num_layers: int, num_positions: int, exact: bool = False) -> float:
        """Seconds of shadow picks of `num_layers` layers at `num_positions` positions."""
        tokens = num_layers * num_positions
        if not tokens:
            return 0.0
        return self.head(tokens) + self.pick(tokens) if exact else self.short(tokens)

    def seed(self, num_layers: int, num_positions: int) -> float:
        """Seconds of probing a prompt at its last positions: the model's logits and shadow picks."""
        return self.head(num_positions) + self.short(num_layers * num_positions) if num_layers else 0.0

    def early_pass(
        self, exit_layer: int, num_rows: int, context: float = CONTEXT, first: bool = False, copies: bool = False
    ) -> float:
        """Seconds of `exit_layer` layers over one token per row.

        Args:
            first: it is the first pass of a round.
            copies: 4-bit copies run it.
        """
        passes = self.copies if copies and self.copies is not None else self
        name = "first" if first and passes.first else "early"
        one = self._between(getattr(passes, name), num_rows, exit_layer, (name, copies))
        return one + exit_layer * self.reading(num_rows, context)

    def verify(self, exit_layer: int, num_rows: int, num_tokens: float, context: float = CONTEXT) -> float:
        """Seconds of the layers from `exit_layer` on over `num_tokens` tokens in all."""
        width = num_tokens / num_rows
        one = self._between(self.late, num_rows, width, "late")
        return (self.num_layers - exit_layer) * (one + self.reading(num_rows, context, width))

    def verify_head(self, num_tokens: float, num_rows: int) -> float:
        """Seconds of the head over `num_tokens` tokens in all, where no early pass of the round used this head."""
        colder = 0.0 if self.plain_head is None else self.plain_head(num_rows) - self.head(num_rows)
        return self.head(num_tokens) + max(0.0, colder)

    def context_of(self, num_cached: Sequence[int]) -> float:
        """The equal context length per row at which reading the cache takes as long as with these lengths."""
        longest, mean = max(num_cached), sum(num_cached) / len(num_cached)
        return mean + self.padding * (longest - mean) if self.padding < 1 else longest

    def reading(self, num_rows: int, context: float, width: float = 1.0) -> float:
        """One layer's extra seconds for reading the cached tokens beyond `CONTEXT` of rows with `context` tokens each.

        Args:
            width: tokens per row in the pass.
        """
        if context <= CONTEXT:
            return 0.0
        beyond, further = context - CONTEXT, self.context_width
        if self.context_widths is not None and num_rows > 1:
            further = self.context_widths(min(num_rows, self.context_widths.points[-1]))
        return self._reading_of(num_rows, beyond) + num_rows * beyond * further * (width - 1)

    def _reading_of(self, num_rows: int, beyond: float) -> float:
        """The same for one token per row. More rows never take less time; between measured numbers it is linear."""
        rows, seconds = 1, beyond * self.context
        for more, table in sorted(self.contexts.items()) if num_rows > 1 else ():
            measured = min(beyond, table.points[-1])
            of_more = max(seconds, more * table(measured) * beyond / measured)
            if num_rows <= more:
                return seconds + (num_rows - rows) / (more - rows) * (of_more - seconds)
            rows, seconds = more, of_more
        return seconds * num_rows / rows

    def _between(self, tables: Mapping[int, Table], num_rows: int, at: float, name: Hashable) -> float:
        """A table's value at `at`, linear between measured numbers of rows; beyond the last, its slope continues."""

        def interpolated() -> float:
            rows = sorted(tables)
            if num_rows <= rows[0] or len(rows) == 1:
                return tables[rows[0]](at)
            i = min(bisect_left(rows, num_rows), len(rows) - 1)
            low = tables[rows[i - 1]](at)
            high = max(low, tables[rows[i]](at))  # more rows never take less time
            return low + (num_rows - rows[i - 1]) / (rows[i] - rows[i - 1]) * (high - low)

        return self.cached((name, num_rows, at), interpolated)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `make()`, computed once per key."""
        if key not in self._cache:
            self._cache[key] = make()
        made: T = self._cache[key]
        return made

    def as_dict(self) -> dict[str, Any]:
        """All fields as plain numbers, for a profile file."""
        single: dict[str, Any] = {name: getattr(self, name).as_dict() for name in _TABLES}
        some = {name: getattr(self, name) for name in (*_OPTIONAL, "copies")}
        return {
            "num_layers": self.num_layers,
            **single,
            **{name: written(getattr(self, name)) for name in _BY_ROWS},
            **{name: getattr(self, name) for name in _NUMBERS},
            **{name: None if part is None else part.as_dict() for name, part in some.items()},
            "recorded": self.recorded and list(self.recorded),
        }

    @classmethod
    def from_dict(cls, given: Any) -> Costs:
        """Read what `as_dict` returned.

        Raises:
            ValueError: `given` is something else.
        """
        try:
            many = {name: read_by_rows(given[name]) for name in _BY_ROWS}
            if not all(1 in many[name] for name in ("first", "early", "late") if many[name] or name != "first"):
                raise ValueError("tables of a single row are missing")
            if not all(rows > 1 and _starts_at_zero(table) for rows, table in many["contexts"].items()):
                raise ValueError("contexts must be of several rows, and their tables begin at 0 tokens with 0 seconds")
            numbers = {name: float(given[name]) for name in _NUMBERS}
            for name, value in numbers.items():
                most = 1.0 if name == "padding" else 1e9
                if not 0 <= value <= most:
                    raise ValueError(f"{name} must lie in 0..{most:g}, got {value}")
            fields: dict[str, Any] = {**many, **numbers, **{name: Table.read(given[name]) for name in _TABLES}}
            fields |= {name: Table.read(given[name]) for name in _OPTIONAL if given.get(name) is not None}
            if given.get("copies") is not None:
                fields["copies"] = Copies.from_dict(given["copies"])
            if given.get("recorded") is not None:
                fields["recorded"] = RoundLimits(*[int(limit) for limit in given["recorded"]])
            return cls(int(given["num_layers"]), **fields)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as problem:
            raise ValueError(f"not a table of costs: {problem}") from problem


def _active_rows(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (number of rows that still draft, number of steps for which they all do), in the order of steps."""
    before = 0
    for ended, length in enumerate(sorted(lengths)):
        if length > before:
            yield len(lengths) - ended, length - before
            before = length


def _starts_at_zero(table: Table) -> bool:
    return len(table.points) > 1 and table.points[0] == table.seconds[0] == 0
