"""`Prompt`, what a method is asked, and `Turn`, its answer; a `Method` is a callable from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from selfspec.decoding.stats import SpecStats


class Prompt(NamedTuple):
    """One turn to be continued."""

    question_id: int | str
    turn: int  # 0 for the first
    text: str
    ids: list[int]
    max_new_tokens: int
    seed: int


@dataclass(slots=True)
class Turn:
    """A method's answer to one prompt. What the method does not tell is None."""

    tokens: list[int]  # with the end-of-text token, if there is one
    seconds: float  # of the whole call, prefill included
    text: str | None = None  # None: to be decoded from the tokens
    accept_lengths: list[int] | None = None  # tokens per step, the target's own one included
    step_seconds: list[float] | None = None  # per step; the first is the time to first token
    prefill_seconds: float | None = None
    stage_seconds: dict[str, float] | None = None
    layer_passes: int | None = None  # layers run one after another, prefill apart
    stats: SpecStats | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)
    asked_seconds: float | None = None  # by the harness's clock, where `seconds` are the method's own


class Failure(Exception):
    """A question that a method could not answer.

    Args:
        kind: "too_long" (no room in the context), "timeout", "crash" (its process ended) or "error".
        sentence: what happened.
        seconds: how long the method had it.
    """

    def __init__(self, kind: str, sentence: str, seconds: float = 0.0) -> None:
        super().__init__(sentence)
        self.kind, self.sentence, self.seconds = kind, sentence, seconds


class Skipped(Exception):
    """A method that cannot run here, in a sentence; the run goes on without it."""


class Method(Protocol):
    """Answers prompts one at a time and times itself: only its own work is inside the clock."""

    @property
    def name(self) -> str: ...
    def __call__(self, prompt: Prompt) -> Turn: ...
    def close(self) -> None: ...


class Steps:
    """Notes when tokens come, and refuses to go on beyond a time limit.

    Args:
        limit: seconds from now.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.start = limit, perf_counter()
        self.stamps: list[float] = []
        self.sizes: list[int] = []

    def add(self, num_tokens: int) -> None:
        now = perf_counter()
        self.stamps.append(now)
        self.sizes.append(num_tokens)
        if now - self.start > self.limit:
            raise Failure("timeout", f"stopped after {self.limit:g} s, at {sum(self.sizes)} tokens", now - self.start)

    @property
    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise([self.start, *self.stamps])]


def added_up(stats: Sequence[SpecStats]) -> SpecStats:
    return sum(stats, SpecStats())
