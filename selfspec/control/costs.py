"""`Costs`: what rounds take on this machine, by measured tables of what they do, and how these are stored."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from selfspec.control.cost_table import Copies, Table, read_by_rows, written
from selfspec.control.plan import LOOKUP

T = TypeVar("T")
CONTEXT = 64  # cached tokens of a row at which the tables hold, and with fewer
LOOKUP_SECONDS = 1e-5  # a row's draft by lookup, wherever there is an interpreter
_TABLES, _BY_ROWS = ("plain", "head", "pick", "rest", "short"), ("first", "early", "late", "contexts")
_OPTIONAL, _NUMBERS = ("context_widths", "wide", "ragged", "plain_head"), ("context", "context_width", "padding")


@dataclass(frozen=True)
class Costs:
    """Seconds of a round by what it does. `first`, `early` and `late` are keyed by the number of rows in the batch.

    Attributes:
        plain: a whole forward, one token per row, by rows.
        early: rows -> an early pass of one token per row, by the number of layers it runs.
        first: the same of a round's first pass, which finds in the caches what verification left there; empty: no
            other than later ones.
        late: rows -> one layer of a verification, by tokens per row.
        head: final norm and vocabulary product, by tokens.
        plain_head: the same of a token per row after a whole forward, by rows, where no early pass has brought the head
            into the caches; None: as any other.
        pick: picking tokens and copying them to the host, by tokens.
        rest: everything else of a round, by rows.
        short: shadow picks over a shortlist of the vocabulary, by positions times layers.
        context: one layer's extra seconds per row and cached token beyond `CONTEXT`, see `context_of`.
        contexts: rows -> one layer's extra seconds for each of so many rows, whose keys leave the caches sooner, by
            cached tokens beyond `CONTEXT`. Each of more rows takes what each of the most does, further tokens what
            those before took in the mean; empty: all as of a single row.
        context_width: what a layer takes longer, per row and such token, for every further token of a row in the pass.
        context_widths: the same for each of several rows, by their number; of more as of the most. None: as of one.
        padding: how far reading goes by the longest row of a batch: 1 where all are read as far as that one goes, 0
            where each is read as far as it goes itself.
        wide: an early pass by its tokens, against that of a single one; None: it grows as verifications do.
        ragged: how many times as long as `late` has it the layers of a verification take in which few rows have many
            tokens and the others one, by rows; None where nobody measured it. It is 1 where tokens are packed end to
            end, and up to 2 where attention is padded to the longest row.
        copies: drafting by copies of the layers; None where there are none.
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
    wide: Table | None = None
    ragged: Table | None = None
    copies: Copies | None = None
    plain_head: Table | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def plain_round(self, num_rows: int, context: float = CONTEXT) -> float:
        """One token for every row by the whole model."""
        return self.round(None, (0,) * num_rows, context)

    def round(self, *shape: Any, **options: Any) -> float:
        """Seconds of a whole round; the arguments are those of `stages`."""
        return sum(self.stages(*shape, **options).values())

    def stages(
        self,
        exit_layer: int | None,
        lengths: Sequence[int],
        context: float = CONTEXT,
        beside: Sequence[int] = (),
        draft_share: float = 1.0,
        copies: bool = False,
    ) -> dict[str, float]:
        """Seconds by stage (draft, verify, head, pick, rest) of a round in which row i drafts `lengths[i]` tokens.

        Where nothing comes of a lookup, the round is a plain one.

        Args:
            context: cached tokens of every row, see `context_of`.
            beside: per row, tokens that its last pass drafts beside the others; none where this is empty.
            draft_share: the share of the vocabulary that is drafted over; its head and picks take that share.
            copies: the draft is written by copies in 4 bits, and verified by all layers.
        """
        rows, tokens = len(lengths), sum(lengths) + len(lengths) + sum(beside)
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
            draft, head, pick = self._by_layers(exit_layer, lengths, context, beside)
            verify, judging = self.verify(exit_layer, rows, tokens, context), self.head(tokens)
        head, pick = draft_share * head + judging, draft_share * pick + self.pick(tokens)
        return {"draft": draft, "verify": verify, "head": head, "pick": pick, "rest": self.rest(rows)}

    def _by_layers(
        self, exit_layer: int, lengths: Sequence[int], context: float, beside: Sequence[int]
    ) -> tuple[float, float, float]:
        """Seconds of early passes, heads and picks; the row's last drafted token runs through the early layers too."""
        draft, head, pick = self.early_pass(exit_layer, len(lengths), context, True), 0.0, 0.0
        for live, steps in _drafting(lengths):
            draft += steps * self.early_pass(exit_layer, live, context)
            head, pick = head + steps * self.head(live), pick + steps * self.pick(live)
        for last in sorted({length for length, more in zip(lengths, beside, strict=False) if more}):
            live, first = sum([length >= last for length in lengths]), last == 0
            wider = live + sum([more for length, more in zip(lengths, beside, strict=True) if length == last])
            draft += self.wide_pass(exit_layer, live, wider, context)
            draft -= self.early_pass(exit_layer, live, context, first)
        return draft, head, pick

    def _by_copies(
        self, copies: Copies, exit_layer: int, lengths: Sequence[int], context: float
    ) -> tuple[float, float, float]:
        """The same by copies in 4 bits, which need not read the last drafted token."""
        draft = head = pick = 0.0
        for i, (live, steps) in enumerate(_drafting(lengths)):
            first = i == 0
            draft += (steps - first) * self.early_pass(exit_layer, live, context, copies=True)
            draft += first * self.early_pass(exit_layer, live, context, True, True)
            head, pick = head + steps * copies.head(live), pick + steps * self.pick(live)
        return draft, head, pick

    def shadow(self, num_layers: int, num_positions: int, exact: bool = False) -> float:
        """Shadow picks at `num_positions` positions for `num_layers` layers each."""
        tokens = num_layers * num_positions
        if not tokens:
            return 0.0
        return self.head(tokens) + self.pick(tokens) if exact else self.short(tokens)

    def seed(self, num_layers: int, num_positions: int) -> float:
        """A look at a prompt's last positions: the whole model's logits there, and shadow picks."""
        return self.head(num_positions) + self.short(num_layers * num_positions) if num_layers else 0.0

    def early_pass(
        self, exit_layer: int, num_rows: int, context: float = CONTEXT, first: bool = False, copies: bool = False
    ) -> float:
        """`exit_layer` layers over one token of each of `num_rows` rows.

        Args:
            first: as the first pass of a round.
            copies: by copies in 4 bits.
        """
        passes = self.copies if copies and self.copies is not None else self
        name = "first" if first and passes.first else "early"
        one = self._between(getattr(passes, name), num_rows, exit_layer, (name, copies))
        return one + exit_layer * self.reading(num_rows, context)

    def wide_pass(self, exit_layer: int, num_rows: int, num_tokens: float, context: float = CONTEXT) -> float:
        """`exit_layer` layers over `num_tokens` tokens of `num_rows` rows in all."""
        if self.wide is not None:
            one, wider = self.wide(num_rows), self.wide(num_tokens)
        else:
            one, wider = (self._between(self.late, num_rows, n / num_rows, "late") for n in (num_rows, num_tokens))
        reading = exit_layer * self.reading(num_rows, context, num_tokens / num_rows)
        return self.early_pass(exit_layer, num_rows) * wider / max(one, 1e-12) + reading

    def verify(self, exit_layer: int, num_rows: int, num_tokens: float, context: float = CONTEXT) -> float:
        """The layers from `exit_layer` on over `num_tokens` tokens in all."""
        width = num_tokens / num_rows
        one = self._between(self.late, num_rows, width, "late")
        return (self.num_layers - exit_layer) * (one + self.reading(num_rows, context, width))

    def verify_head(self, num_tokens: float, num_rows: int) -> float:
        """The head over so many tokens of so many rows, after all layers, none of which this head drafted for."""
        colder = 0.0 if self.plain_head is None else self.plain_head(num_rows) - self.head(num_rows)
        return self.head(num_tokens) + max(0.0, colder)

    def context_of(self, num_cached: Sequence[int]) -> float:
        """The tokens that every row would have to hold for reading them to take as long as it does of these rows."""
        longest, mean = max(num_cached), sum(num_cached) / len(num_cached)
        return mean + self.padding * (longest - mean) if self.padding < 1 else longest

    def reading(self, num_rows: int, context: float, width: float = 1.0) -> float:
        """One layer's extra seconds for the cached tokens beyond `CONTEXT` of rows that hold `context` each.

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
        """Of a token per row: between measured numbers of rows, of which more never take less, what lies between."""
        rows, seconds = 1, beyond * self.context
        for more, table in sorted(self.contexts.items()) if num_rows > 1 else ():
            measured = min(beyond, table.points[-1])
            of_more = max(seconds, more * table(measured) * beyond / measured)
            if num_rows <= more:
                return seconds + (num_rows - rows) / (more - rows) * (of_more - seconds)
            rows, seconds = more, of_more
        return seconds * num_rows / rows

    def _between(self, tables: Mapping[int, Table], num_rows: int, at: float, name: Hashable) -> float:
        """Linear in the number of rows between the two measured ones around it, on along the last slope beyond."""

        def interpolated() -> float:
            rows = sorted(tables)
            if num_rows <= rows[0] or len(rows) == 1:
                return tables[rows[0]](at)
            i = min(bisect_left(rows, num_rows), len(rows) - 1)
            low = tables[rows[i - 1]](at)
            high = max(low, tables[rows[i]](at))  # more rows never take less, whatever noise says
            return low + (num_rows - rows[i - 1]) / (rows[i] - rows[i - 1]) * (high - low)

        return self.cached((name, num_rows, at), interpolated)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is made of these costs, made once."""
        if key not in self._cache:
            self._cache[key] = make()
        made: T = self._cache[key]
        return made

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for a profile file."""
        single: dict[str, Any] = {name: getattr(self, name).as_dict() for name in _TABLES}
        some = {name: getattr(self, name) for name in (*_OPTIONAL, "copies")}
        return {
            "num_layers": self.num_layers,
            **single,
            **{name: written(getattr(self, name)) for name in _BY_ROWS},
            **{name: getattr(self, name) for name in _NUMBERS},
            **{name: None if part is None else part.as_dict() for name, part in some.items()},
        }

    @classmethod
    def from_dict(cls, given: Any) -> Costs:
        """What `as_dict` wrote.

        Raises:
            ValueError: it is anything else.
        """
        try:
            # Tables that were written before some were measured.
            read = {"first": {}, "contexts": {}, "context_width": 0.0, "padding": 1.0, **given}
            many = {name: read_by_rows(read[name]) for name in _BY_ROWS}
            if not all(1 in many[name] for name in ("first", "early", "late") if many[name] or name != "first"):
                raise ValueError("tables of a single row are missing")
            if not all(rows > 1 and _begins_at_nothing(table) for rows, table in many["contexts"].items()):
                raise ValueError("contexts must be of several rows, each from 0 tokens in 0 seconds on")
            numbers = {name: float(read[name]) for name in _NUMBERS}
            for name, value in numbers.items():
                most = 1.0 if name == "padding" else 1e9
                if not 0 <= value <= most:
                    raise ValueError(f"{name} must lie in 0..{most:g}, got {value}")
            fields: dict[str, Any] = {**many, **numbers, **{name: Table.read(read[name]) for name in _TABLES}}
            fields |= {name: Table.read(read[name]) for name in _OPTIONAL if read.get(name) is not None}
            if read.get("copies") is not None:
                fields["copies"] = Copies.from_dict(read["copies"])
            return cls(int(read["num_layers"]), **fields)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as problem:
            raise ValueError(f"not a table of costs: {problem}") from problem


def _drafting(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """How many rows draft a token at first, and for how many steps; then fewer of them, and so on."""
    before = 0
    for ended, length in enumerate(sorted(lengths)):
        if length > before:
            yield len(lengths) - ended, length - before
            before = length


def _begins_at_nothing(table: Table) -> bool:
    return len(table.points) > 1 and table.points[0] == table.seconds[0] == 0
