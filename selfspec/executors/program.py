"""`Executor`: who runs the rounds of a plan; and how a round of a plan drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from selfspec.control.plan import LOOKUP, Plan, Policy
from selfspec.control.rows import StageSeconds
from selfspec.drafting.prompt_lookup import Guess
from selfspec.executors.picker import Picker
from selfspec.executors.prefill import prefill
from selfspec.executors.rows import Row
from selfspec.executors.verdict import Verdict
from selfspec.model.kv_cache import PagedCache
from selfspec.model.stack import Stack


class Executed(NamedTuple):
    """A round that was run. Its rows do not hold its tokens yet."""

    exit_layer: int | None  # what drafted, if anything was: a layer, or `LOOKUP`
    verdicts: list[Verdict]  # of every row
    seconds: StageSeconds


class RoundDraft(NamedTuple):
    """How a round of a plan drafts."""

    plan: Plan  # its draft lengths fit into the rows
    given: Sequence[Guess] | None = None  # every row's draft by lookup, empty where it has none; None: no lookup drafts

    def with_matches(self, verdicts: list[Verdict]) -> list[Verdict]:
        """The verdicts of rows that drafted by lookup, with the match that each draft follows."""
        if self.given is None:
            return verdicts
        pairs = zip(verdicts, self.given, strict=True)
        return [v._replace(match=g.match, is_stored=g.is_stored) if g.tokens else v for v, g in pairs]


class Executor:
    """Runs plans. Keys and values are written beyond what rows hold; whoever takes the rounds adds tokens to the rows.

    Args:
        new_seconds: makes the clock of a round.
    """

    def __init__(
        self, stack: Stack, cache: PagedCache, picker: Picker, new_seconds: Callable[[], StageSeconds] = StageSeconds
    ) -> None:
        self.stack, self.cache, self.picker, self.new_seconds = stack, cache, picker, new_seconds

    def prefill(self, rows: Sequence[Row], max_tokens: int, policy: Policy) -> None:
        """Write keys and values of at most so many prompt tokens."""
        prefill(self.stack, self.cache, self.picker, rows, max_tokens, policy)

    def serves(self, rows: Sequence[Row], plan: Plan) -> bool:
        """Whether it can run this plan."""
        raise NotImplementedError

    def round(self, rows: Sequence[Row], draft: RoundDraft) -> Executed:
        """Draft and verify once for every row."""
        raise NotImplementedError

    def run(self, rows: Sequence[Row], plan: Plan, deadline: float) -> Iterator[Executed]:
        """The rounds of a plan, all of them final; the caller adds each to its rows before it asks for the next.

        Args:
            deadline: seconds after which no further round begins.
        """
        clock = self.new_seconds()
        begin = clock.now()
        for _ in range(plan.num_rounds):
            draft = next_draft(rows, plan)
            yield self.round(rows, draft)
            if draft.plan.shadow is not None or any(row.has_ended for row in rows):
                return
            if clock.now() - begin >= deadline:
                return


def next_draft(rows: Sequence[Row], plan: Plan) -> RoundDraft:
    """How the next round of a plan drafts, by what its rows hold now."""
    rooms, table = [row.room - 1 for row in rows], plan.table
    if table is not None:
        lengths = table.drafted([row.lookup.match for row in rows], rooms)
        if lengths is not None:
            given = [row.lookup.guess(length) for row, length in zip(rows, lengths, strict=True)]
            return RoundDraft(Plan(LOOKUP, tuple([len(guess.tokens) for guess in given])), given)
    if next_exit(rows, plan) is not None:
        lengths = tuple([min(length, room) for length, room in zip(plan.draft_lengths, rooms, strict=True)])
        return RoundDraft(plan if lengths == plan.draft_lengths else replace(plan, draft_lengths=lengths))
    return RoundDraft(Plan(None, (0,) * len(rows), shadow=plan.shadow))


def next_exit(rows: Sequence[Row], plan: Plan) -> int | None:
    """The layer that drafts in the next round that lookup does not; None where no row has room for what it would."""
    if not plan.exit_layer:
        return None
    has_room = any(length and row.room > 1 for length, row in zip(plan.draft_lengths, rows, strict=True))
    return plan.exit_layer if has_room or not any(plan.draft_lengths) else None
