"""`Executor`, the base class of what runs the rounds of a plan, and `next_draft`, which decides how a round drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from selfspec.control.plan import Policy, table_of
from selfspec.core import LOOKUP, Draft, Plan, RoundOutput, RowRound, Sequence, StageSeconds
from selfspec.drafting.grammar import with_forced
from selfspec.executors.picker import Picker
from selfspec.executors.prefill import prefill
from selfspec.model.kv_cache import PagedCache
from selfspec.model.split_model import SplitModel


class RoundDraft(NamedTuple):
    """How one round of a plan drafts."""

    plan: Plan  # with draft lengths cut to the tokens that the rows may still emit
    given: list[Draft] | None = None  # per row, its draft by lookup or grammar, possibly empty; None: layers may draft
    longest: int = 0  # maximum draft length of a row in this and later rounds; 0: that of this round

    def add_matches(self, rows: list[RowRound]) -> None:
        """Report the match lengths of rows that drafted by lookup."""
        for row, draft in zip(rows, self.given or (), strict=False):
            if draft.token_ids:
                row.match_length, row.source = draft.match_length, draft.source


class Executor:
    """Runs plans. It writes keys and values to the cache; the caller adds the emitted tokens to the sequences.

    Args:
        split: the model's layers and heads.
        cache: the KV cache of the sequences.
        picker: picks tokens from logits.
        new_seconds: makes the clock of a round.
    """

    times_stages = True
    """Whether the seconds of its rounds are those of their stages; False: of whole rounds."""

    def __init__(
        self,
        split: SplitModel,
        cache: PagedCache,
        picker: Picker,
        new_seconds: Callable[[], StageSeconds] = StageSeconds,
    ) -> None:
        self.split, self.cache, self.picker, self.new_seconds = split, cache, picker, new_seconds

    def prefill(self, rows: list[Sequence], max_tokens: int, policy: Policy) -> None:
        """Write keys and values of at most `max_tokens` prompt tokens."""
        prefill(self.split, self.cache, self.picker, rows, max_tokens, policy)

    def prepare(self, likely: Callable[[int], list[Plan]], max_rows: int) -> None:
        """Do now what the first rounds of a policy's plans would wait for.

        Args:
            likely: gives the plans to expect for a number of rows, see `Policy.likely`.
            max_rows: most rows of a batch.
        """

    def serves(self, rows: list[Sequence], plan: Plan) -> bool:
        """Whether this executor can run the plan on these rows."""
        raise NotImplementedError

    def round(self, rows: list[Sequence], draft: RoundDraft) -> RoundOutput:
        """Run one round: draft and verify for every row."""
        raise NotImplementedError

    def run(self, rows: list[Sequence], plan: Plan, deadline: float) -> Iterator[RoundOutput]:
        """Run the rounds of a plan and yield their results, each with all rows in order.

        The caller adds a round's tokens to the sequences before it takes the next round. The plan ends after
        `plan.num_rounds` rounds, after a round with a probe, when a sequence has ended, or when layers have drafted and
        the ledger covers no such round more; at most one more round then follows, which had begun before and in which
        a sequence that has ended got no tokens.

        Args:
            deadline: seconds after which no further round begins. At least one round runs.
        """
        clock = self.new_seconds()
        begin = clock.now()
        for _ in range(plan.num_rounds):
            draft = next_draft(rows, plan)
            yield (made := self.round(rows, draft))
            if draft.plan.shadow is not None or any(row.is_finished or row.num_remaining < 1 for row in rows):
                return
            if plan.ledger is not None and self.split.ranks is None:  # else ranks, whose clocks differ, would part
                ledger = plan.ledger.after(made)
                plan = replace(plan, ledger=ledger)
                if made.exit_layer and not ledger.covers_layers:
                    return
            if clock.now() - begin >= deadline:
                return


def next_draft(rows: list[Sequence], plan: Plan) -> RoundDraft:
    """How the next round of a plan drafts, given the rows' current tokens."""
    most, table = [row.num_remaining - 1 for row in rows], table_of(plan)
    given: list[Draft] | None = None
    if table is not None:
        lookups = [row.lookup for row in rows]
        lengths = table.drafted([own.match for own in lookups], most, [own.source for own in lookups], plan.ledger)
        if lengths is not None:
            given = [own.draft(length) for own, length in zip(lookups, lengths, strict=True)]
    if any(row.grammar is not None for row in rows):
        given = with_forced(rows, given, plan.most_forced, most)
    if given is not None:
        return RoundDraft(Plan(LOOKUP, tuple([len(draft.token_ids) for draft in given])), given)
    if next_exit(rows, plan) is not None:
        lengths = tuple([min(pair) for pair in zip(plan.draft_lengths, most, strict=True)])
        cut = plan if lengths == plan.draft_lengths else replace(plan, draft_lengths=lengths)
        return RoundDraft(cut, longest=max(plan.draft_lengths))
    return RoundDraft(Plan(None, (0,) * len(rows), shadow=plan.shadow))


def next_exit(rows: list[Sequence], plan: Plan) -> int | None:
    """The layer that drafts in rounds without lookup; None if no layer drafts or no row may emit a drafted token."""
    if not plan.exit_layer or (plan.ledger is not None and not plan.ledger.covers_layers):
        return None
    has_room = any(length and row.num_remaining > 1 for length, row in zip(plan.draft_lengths, rows, strict=True))
    return plan.exit_layer if has_room or not any(plan.draft_lengths) else None
