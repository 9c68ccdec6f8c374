"""`Costs`: what rounds take on this machine, by what their pieces do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from selfspec.control.measured import CONTEXT, Copies, Measured
from selfspec.control.plan import LOOKUP
from selfspec.control.table import Table

T = TypeVar("T")
LOOKUP_SECONDS = 1e-5  # a row's draft by lookup, wherever there is an interpreter


@dataclass(frozen=True)
class Costs(Measured):
    """Seconds of rounds; see `Measured` for what they are made of."""

    def plain_round(self, num_rows: int, context: float = CONTEXT) -> float:
        """One token for every row by the whole model."""
        return self.round(None, (0,) * num_rows, context)

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
        judging = self.whole_head(tokens, rows)
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

    def round(
        self,
        exit_layer: int | None,
        lengths: Sequence[int],
        context: float = CONTEXT,
        beside: Sequence[int] = (),
        draft_share: float = 1.0,
        copies: bool = False,
    ) -> float:
        """Seconds of a whole round; see `stages`."""
        return sum(self.stages(exit_layer, lengths, context, beside, draft_share, copies).values())

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

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """What somebody has made of these costs, which he finds here again under his `key`."""
        if key not in self._known:
            self._known[key] = make()
        made: T = self._known[key]
        return made


def _drafting(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """How many rows draft a token at first, and for how many steps; then fewer of them, and so on."""
    before = 0
    for ended, length in enumerate(sorted(lengths)):
        if length > before:
            yield len(lengths) - ended, length - before
            before = length
