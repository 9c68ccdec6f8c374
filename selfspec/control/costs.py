"""`Costs`: what each piece of a round takes on this machine, as measured tables.

Values between measured points are interpolated, values beyond the last continue its slope; nothing is fitted over the
whole range, since real costs have steps (arXiv 2310.18813; the field's engines agree on tables).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from selfspec.control.plan import LOOKUP
from selfspec.control.table import Table, interpolate

T = TypeVar("T")
LOOKUP_SECONDS = 1e-5  # a row's draft by lookup, wherever there is an interpreter
CONTEXT = 64  # cached tokens of the longest row at which the tables hold, and of shorter ones


@dataclass(frozen=True)
class Copies:
    """Drafting by copies of the layers and the head in 4 bits: as `first`, `early` and `head` of `Costs`."""

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
class Costs:
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
        context: one layer's extra seconds per row and cached token of the longest row, beyond `CONTEXT`: rows are read
            together, as far as the longest of them goes.
        context_rows: the same for each of several rows, whose keys leave the caches sooner, by their number; beyond the
            last as there. None: as for a single one.
        context_width: what a layer takes longer, per row and such token, for every further token of a row in the pass.
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
    context_rows: Table | None = None
    context_width: float = 0.0
    first: Mapping[int, Table] = field(default_factory=dict)
    wide: Table | None = None
    ragged: Table | None = None
    copies: Copies | None = None
    plain_head: Table | None = None
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def plain_round(self, num_rows: int, context: float = CONTEXT) -> float:
        """One token for every row by the whole model."""
        return self.round(None, (0,) * num_rows, context)

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

    def reading(self, num_rows: int, context: float, width: float = 1.0) -> float:
        """One layer's extra seconds for the cached tokens beyond `CONTEXT` of the longest row.

        Args:
            width: tokens per row in the pass.
        """
        if context <= CONTEXT:
            return 0.0
        of_rows, each = self.context_rows, self.context
        if of_rows is not None:
            each = of_rows(min(num_rows, of_rows.points[-1]))
        return (context - CONTEXT) * num_rows * (each + self.context_width * (width - 1))

    def stages(
        self,
        exit_layer: int | None,
        lengths: Sequence[int],
        context: float = CONTEXT,
        beside: Sequence[int] = (),
        draft_share: float = 1.0,
        widths: Sequence[int] = (),
        copies: bool = False,
    ) -> dict[str, float]:
        """Seconds by stage (draft, verify, head, pick, rest) of a round in which row i drafts `lengths[i]` tokens.

        Where nothing comes of a lookup, the round is a plain one.

        Args:
            context: cached tokens of the longest row.
            beside: per row, tokens that its last pass drafts beside the others; none where this is empty.
            widths: of a cascade, tokens of each early pass but the last; empty: one each.
            draft_share: the share of the vocabulary that is drafted over; its head and picks take that share.
            copies: the draft is written by copies in 4 bits, and verified by all layers.
        """
        rows, tokens = len(lengths), sum(lengths) + len(lengths) + sum(beside)
        draft = head = pick = 0.0
        judging = self.whole_head(tokens, rows)
        if exit_layer is None or (exit_layer == LOOKUP and tokens == rows):
            draft = 0.0 if exit_layer is None else rows * LOOKUP_SECONDS
            verify = self.plain(rows) + self.num_layers * self.reading(rows, context)
        elif exit_layer == LOOKUP:
            draft, verify = rows * LOOKUP_SECONDS, self.verify(LOOKUP, rows, tokens, context)
        elif copies and self.copies is not None and not widths:
            draft, head, pick = self._by_copies(self.copies, exit_layer, lengths, context)
            verify = self.verify(LOOKUP, rows, tokens, context)
        else:
            draft, head, pick = (
                self._by_cascade(exit_layer, widths, context, sum(beside))
                if widths
                else self._by_layers(exit_layer, lengths, context, beside)
            )
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

    def _by_cascade(
        self, exit_layer: int, widths: Sequence[int], context: float, beside: int
    ) -> tuple[float, float, float]:
        """The same of a single row whose passes but the last are of so many tokens."""
        draft = head = pick = 0.0
        for step, width in enumerate([*widths, 1 + beside]):
            narrow = self.early_pass(exit_layer, 1, first=step == 0)
            draft += narrow * self.wide_pass(exit_layer, 1, width) / max(self.early_pass(exit_layer, 1), 1e-12)
            draft += exit_layer * self.reading(1, context, width)
            if step < len(widths):
                head, pick = head + self.head(width), pick + self.pick(width)
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

    def round(
        self,
        exit_layer: int | None,
        lengths: Sequence[int],
        context: float = CONTEXT,
        beside: Sequence[int] = (),
        draft_share: float = 1.0,
        widths: Sequence[int] = (),
        copies: bool = False,
    ) -> float:
        """Seconds of a whole round; see `stages`."""
        return sum(self.stages(exit_layer, lengths, context, beside, draft_share, widths, copies).values())

    def shadow(self, num_layers: int, num_positions: int, exact: bool = False) -> float:
        """Shadow picks at `num_positions` positions for `num_layers` layers each."""
        tokens = num_layers * num_positions
        if not tokens:
            return 0.0
        return self.head(tokens) + self.pick(tokens) if exact else self.short(tokens)

    def seed(self, num_layers: int, num_positions: int) -> float:
        """A look at a prompt's last positions: the whole model's logits there, and shadow picks."""
        return self.head(num_positions) + self.short(num_layers * num_positions) if num_layers else 0.0

    def with_head(self, layers: float) -> Costs:
        """The same machine with a head that costs as much as `layers` layers of a plain forward, at any width."""
        one = self.plain(1) / self.num_layers
        grows = [self.late[1](n) / self.late[1](1) for n in self.head.points]
        head = Table(self.head.points, tuple(layers * one * g for g in grows))
        copies = self.copies
        if copies is not None:
            copies = replace(copies, head=copies.head.scaled(head(1) / max(self.head(1), 1e-12)))
        return replace(self, head=head, copies=copies, plain_head=None)

    def _between(self, tables: Mapping[int, Table], num_rows: int, at: float, kind: str) -> float:
        """Linear in the number of rows between the two measured ones around it."""
        key = (kind, num_rows, at)
        known: float | None = self._known.get(key)
        if known is None:
            known = self._known[key] = interpolate(sorted(tables), num_rows, lambda rows: tables[rows](at))
        return known

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """What somebody has made of these costs, which he finds here again under his `key`."""
        if key not in self._known:
            self._known[key] = make()
        made: T = self._known[key]
        return made

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for a profile file."""
        return {
            "num_layers": self.num_layers,
            **{name: getattr(self, name).as_dict() for name in ("plain", "head", "pick", "rest", "short")},
            **{name: _plain(getattr(self, name)) for name in ("first", "early", "late")},
            "context": self.context,
            "context_width": self.context_width,
            **{
                name: None if (table := getattr(self, name)) is None else table.as_dict()
                for name in ("context_rows", "wide", "ragged", "copies", "plain_head")
            },
        }

    @classmethod
    def from_dict(cls, given: Any) -> Costs:
        """What `as_dict` wrote; ValueError when it is anything else."""
        try:
            ones = {name: Table.read(given[name]) for name in ("plain", "head", "pick", "rest", "short")}
            tables = {"first": {}, **given}  # older tables know of no first pass
            many = {name: _by_rows(tables[name]) for name in ("first", "early", "late")}
            if not all(1 in tables for name, tables in many.items() if tables or name != "first"):
                raise ValueError("tables of a single row are missing")
            single = {"context": float(given["context"]), "context_width": float(given.get("context_width", 0.0))}
            for name, value in single.items():
                if not 0 <= value < float("inf"):
                    raise ValueError(f"{name} must be finite and not negative, got {value}")
            names = ("context_rows", "wide", "ragged", "plain_head")
            some = {name: None if given.get(name) is None else Table.read(given[name]) for name in names}
            copies = None if given.get("copies") is None else Copies.from_dict(given["copies"])
            return cls(int(given["num_layers"]), **ones, **many, **single, **some, copies=copies)  # type: ignore[arg-type]
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as problem:
            raise ValueError(f"not a table of costs: {problem}") from problem


def _drafting(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """How many rows draft a token at first, and for how many steps; then fewer of them, and so on."""
    before = 0
    for ended, length in enumerate(sorted(lengths)):
        if length > before:
            yield len(lengths) - ended, length - before
            before = length


def _plain(tables: Mapping[int, Table]) -> dict[str, dict[str, float]]:
    return {str(rows): table.as_dict() for rows, table in tables.items()}


def _by_rows(given: Mapping[str, Mapping[str, float]]) -> dict[int, Table]:
    return {int(rows): Table.read(table) for rows, table in given.items()}
