"""`Plan`, what a policy decides for a round, and `Policy`, who decides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class RowState(NamedTuple):
    """What a policy may know of a row before a round."""

    request_id: int
    content_length: int  # prompt and output so far, in tokens
    room: int  # tokens it may still emit, at least 1


class RowOutcome(NamedTuple):
    """What became of a row's draft in a round."""

    request_id: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One round: where to leave early and how far each row guesses. `exit_layer` None is plain decoding."""

    exit_layer: int | None
    draft_lengths: tuple[int, ...]  # per row, each below the row's room
    min_confidence: float = 0.0  # a row stops after a drafted token less probable than this under the draft


class Policy(Protocol):
    """Chooses plans; its decisions change speed, never tokens."""

    def plan(self, rows: Sequence[RowState]) -> Plan: ...

    def observe(self, plan: Plan, outcomes: Sequence[RowOutcome]) -> None: ...
