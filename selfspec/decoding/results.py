"""What an engine hands out: a `Round`, with a `RowResult` for every row that took part."""

from __future__ import annotations

from typing import NamedTuple

from selfspec.control.plan import Plan
from selfspec.control.rows import StageSeconds
from selfspec.decoding.request import Completion
from selfspec.decoding.stopping import LateText
from selfspec.executors.logprobs import TokenLogprobs


class RowResult(NamedTuple):
    """What one row got out of a round."""

    request_id: int
    tokens: list[int]  # kept tokens: accepted drafts, then the target's own next token unless the row ended before it
    told: str | LateText  # see `text`
    drafted: list[int]  # what was drafted, rejected tokens included; of a tree, the branch that the output followed
    num_accepted: int  # drafted tokens among `tokens`
    completion: Completion | None  # once the row has ended
    num_beside: int = 0  # tokens drafted on other branches
    logprobs: list[TokenLogprobs] | None = None  # of `tokens`, where the request asks for them

    @property
    def text(self) -> str:
        """What became certain with these tokens; turned into text when first asked for."""
        return str(self.told)


class Round(NamedTuple):
    """One round of the engine; rows that only prefilled are not in it."""

    rows: list[RowResult]
    plan: Plan | None  # of the program that it is a round of; None when no row was ready to decode
    seconds: StageSeconds
    exit_layer: int | None = None  # what drafted in it: a layer, 0 for lookup, or None
    program_index: int = 0  # its place among the rounds of its program
    num_wasted: int = 0  # tokens that were decoded beyond the end of a row
