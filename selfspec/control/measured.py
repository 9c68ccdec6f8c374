"""`Measured`: what was timed on this machine, as tables, what passes take by them, and how they are stored.

Values between measured points are interpolated, values beyond the last continue its slope; nothing is fitted over the
whole range, since real costs have steps (arXiv 2310.18813; the field's engines agree on tables).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from selfspec.control.table import Table, interpolate

CONTEXT = 64  # cached tokens of a row at which the tables hold, and with fewer


@dataclass(frozen=True)
class Copies:
    """Drafting by copies of the layers and the head in 4 bits: as `first`, `early` and `head` of `Measured`."""

    first: Mapping[int, Table]
    early: Mapping[int, Table]
    head: Table

    def as_dict(self) -> dict[str, Any]:
        return {**{name: _plain(getattr(self, name)) for name in ("first", "early")}, "head": self.head.as_dict()}

    @classmethod
    def from_dict(cls, given: Any) -> Copies:
        first, early = _by_rows(given["first"]), _by_rows(given["early"])
        if not (1 in first and 1 in early):
            raise ValueError("tables of copies for a single row are missing")
        return cls(first, early, Table.read(given["head"]))


@dataclass(frozen=True)
class Measured:
    """Seconds of the pieces of a round. `first`, `early` and `late` are keyed by the number of rows in the batch.

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
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def early_pass(
        self, exit_layer: int, num_rows: int, context: float = CONTEXT, first: bool = False, copies: bool = False
    ) -> float:
        """`exit_layer` layers over one token of each of `num_rows` rows.

        Args:
            first: as the first pass of a round.
            copies: by copies in 4 bits.
        """
        extra = exit_layer * self.reading(num_rows, context)
        passes = self.copies if copies and self.copies is not None else self
        if first and passes.first:
            return self._between(passes.first, num_rows, exit_layer, f"first {copies}") + extra
        return self._between(passes.early, num_rows, exit_layer, f"early {copies}") + extra

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

    def whole_head(self, num_tokens: float, num_rows: int) -> float:
        """The head over so many tokens of so many rows, after all layers, none of which this head drafted for."""
        colder = 0.0 if self.plain_head is None else self.plain_head(num_rows) - self.head(num_rows)
        return self.head(num_tokens) + max(0.0, colder)

    def context_of(self, num_cached: Sequence[int]) -> float:
        """The tokens that every row would have to hold for reading them to take as long as it does of these rows."""
        longest = max(num_cached)
        if len(num_cached) == 1 or self.padding == 1:
            return longest
        mean = sum(num_cached) / len(num_cached)
        return mean + self.padding * (longest - mean)

    def reading(self, num_rows: int, context: float, width: float = 1.0) -> float:
        """One layer's extra seconds for the cached tokens beyond `CONTEXT` of rows that hold `context` each.

        Args:
            width: tokens per row in the pass.
        """
        if context <= CONTEXT:
            return 0.0
        beyond = context - CONTEXT
        further, widths = self.context_width, self.context_widths
        if widths is not None and num_rows > 1:
            further = widths(min(num_rows, widths.points[-1]))
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

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for a profile file."""
        return {
            "num_layers": self.num_layers,
            **{name: getattr(self, name).as_dict() for name in ("plain", "head", "pick", "rest", "short")},
            **{name: _plain(getattr(self, name)) for name in ("first", "early", "late", "contexts")},
            "context": self.context,
            "context_width": self.context_width,
            "padding": self.padding,
            **{
                name: None if (table := getattr(self, name)) is None else table.as_dict()
                for name in ("context_widths", "wide", "ragged", "copies", "plain_head")
            },
        }

    @classmethod
    def from_dict(cls, given: Any) -> Self:
        """What `as_dict` wrote; ValueError when it is anything else."""
        try:
            ones = {name: Table.read(given[name]) for name in ("plain", "head", "pick", "rest", "short")}
            tables = {"first": {}, "contexts": {}, **given}  # older tables know of neither
            many = {name: _by_rows(tables[name]) for name in ("first", "early", "late", "contexts")}
            if not all(1 in many[name] for name in ("first", "early", "late") if many[name] or name != "first"):
                raise ValueError("tables of a single row are missing")
            if not all(rows > 1 and _begins_at_nothing(table) for rows, table in many["contexts"].items()):
                raise ValueError("contexts must be of several rows, each from 0 tokens in 0 seconds on")
            single = {"context": float(given["context"]), "context_width": float(given.get("context_width", 0.0))}
            single["padding"] = float(given.get("padding", 1.0))
            for name, value in single.items():
                if not 0 <= value < float("inf"):
                    raise ValueError(f"{name} must be finite and not negative, got {value}")
            if single["padding"] > 1:
                raise ValueError(f"padding must be at most 1, got {single['padding']}")
            names = ("context_widths", "wide", "ragged", "plain_head")
            some = {name: None if given.get(name) is None else Table.read(given[name]) for name in names}
            copies = None if given.get("copies") is None else Copies.from_dict(given["copies"])
            return cls(int(given["num_layers"]), **ones, **many, **single, **some, copies=copies)  # type: ignore[arg-type]
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as problem:
            raise ValueError(f"not a table of costs: {problem}") from problem

    def _between(self, tables: Mapping[int, Table], num_rows: int, at: float, kind: str) -> float:
        """Linear in the number of rows between the two measured ones around it."""
        key = (kind, num_rows, at)
        known: float | None = self._known.get(key)
        if known is None:
            known = self._known[key] = interpolate(sorted(tables), num_rows, lambda rows: tables[rows](at))
        return known


def _plain(tables: Mapping[int, Table]) -> dict[str, dict[str, float]]:
    return {str(rows): table.as_dict() for rows, table in tables.items()}


def _begins_at_nothing(table: Table) -> bool:
    return len(table.points) > 1 and table.points[0] == table.seconds[0] == 0


def _by_rows(given: Mapping[str, Mapping[str, float]]) -> dict[int, Table]:
    return {int(rows): Table.read(table) for rows, table in given.items()}
