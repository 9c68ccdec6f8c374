"""Drafts of tokens that grammars force: each is the only one that its mask allows, so that none is ever rejected."""

from __future__ import annotations

from collections import abc

from selfspec.control.plan import GRAMMAR
from selfspec.core import LOOKUP, Draft, RoundOutput, Sequence


def most_forced(row: Sequence, most: int) -> int:
    """The maximum number of forced tokens that a row drafts, of which a plan allows `most` per row."""
    return most if row.grammar is not None and row.request.params.speculative else 0


def drafter_of(round_: RoundOutput) -> str:
    """What drafted: "exit", "lookup", "grammar" where all drafted tokens are forced, or "plain": nothing did."""
    if round_.exit_layer != LOOKUP:
        return "plain" if round_.exit_layer is None else "exit"
    return "grammar" if all(row.source == GRAMMAR for row in round_.rows if row.drafted) else "lookup"


def with_forced(
    rows: list[Sequence], drafts: abc.Sequence[Draft] | None, most: int, capacities: abc.Sequence[int]
) -> list[Draft] | None:
    """Drafts by lookup, up to what grammars allow, or forced tokens where these are more; None: no row drafts any.

    `kernels/cpu/program.cpp` does the same.

    Args:
        drafts: per row, by lookup; None: no row drafts by lookup.
        most: the plan's `most_forced`.
        capacities: per row, the maximum draft length.
    """
    made = []
    for row, draft, capacity in zip(rows, drafts or [Draft([])] * len(rows), capacities, strict=True):
        if row.grammar is not None:
            with row.blame():
                allowed = draft.token_ids[: row.grammar.num_allowed(draft.token_ids)]
                forced = row.grammar.forced(max(0, min(most_forced(row, most), capacity)))
            draft = draft._replace(token_ids=allowed)
            if len(forced) > len(allowed):
                draft = Draft(forced, len(forced), GRAMMAR)
        made.append(draft)
    return made if any(draft.token_ids for draft in made) else None
