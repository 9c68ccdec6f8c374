"""Prompts, answers to them, and answers as lines of a file: Spec-Bench's format with additional keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

from selfspec.decoding.outputs import SpecStats

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
Row = dict[str, Any]


class Prompt(NamedTuple):
    """One turn of a question; `turn` is 0 for the first."""

    question_id: int | str
    turn: int
    text: str
    ids: list[int]
    max_new_tokens: int
    seed: int


@dataclass(slots=True)
class Turn:
    """A method's answer to one prompt; None is a value that the method does not report."""

    tokens: list[int]  # with the end-of-text token, if there is one
    seconds: float  # of the whole call, prefill included
    accept_lengths: list[int] | None = None  # tokens per step, with the target's own
    step_seconds: list[float] | None = None  # per step; the first is the time to first token
    prefill_seconds: float | None = None
    stage_seconds: dict[str, float] | None = None
    layer_passes: int | None = None  # layers run one after another, without prefill
    stats: SpecStats | None = None


class Failure(Exception):
    """A question that a method could not answer.

    Args:
        kind: "too_long" (the context is full), "timeout" or "error".
        sentence: the reason.
        seconds: time that the method spent on the question.
    """

    def __init__(self, kind: str, sentence: str, seconds: float = 0.0) -> None:
        super().__init__(sentence)
        self.kind, self.sentence, self.seconds = kind, sentence, seconds


class Skipped(Exception):
    """A method cannot run on this machine or model; the message says why. The run continues without it."""


class Method(ABC):
    """Answers prompts one at a time, and times only its own work."""

    name: str

    @abstractmethod
    def __call__(self, prompt: Prompt) -> Turn: ...

    def forget(self) -> None:  # noqa: B027
        """Forget the answers so far, as after untimed ones."""

    def close(self) -> None:  # noqa: B027  (most methods hold nothing to release)
        """Release what the method holds."""


class Steps:
    """Records the size and time of every step, and raises `Failure` after `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self.limit, self.start = limit, perf_counter()
        self.times: list[float] = []
        self.sizes: list[int] = []

    def add(self, num_tokens: int) -> None:
        now = perf_counter()
        self.times.append(now)
        self.sizes.append(num_tokens)
        if now - self.start > self.limit:
            raise Failure("timeout", f"stopped after {self.limit:g} s, at {sum(self.sizes)} tokens", now - self.start)

    @property
    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise([self.start, *self.times])]


class Item(NamedTuple):
    """A method's answer to one question, summed over its turns; None is unknown."""

    question_id: int | str
    category: str
    num_tokens: int
    seconds: float
    accept_lengths: list[int]
    steps: list[list[tuple[int, float]]] | None  # per turn: (tokens, seconds) of every step
    prefill_seconds: float | None
    stage_seconds: dict[str, float] | None
    layer_passes: int | None
    stats: SpecStats | None

    @property
    def speed(self) -> float:
        """Tokens per second, prefill included."""
        return self.num_tokens / self.seconds


def choice_of(turns: Sequence[Turn], texts: Sequence[str]) -> dict[str, Any]:
    """The `choices` entry of an answer; the keys up to `accept_lengths` are Spec-Bench's."""
    stats = [turn.stats for turn in turns if turn.stats is not None]
    stages = [turn.stage_seconds for turn in turns if turn.stage_seconds is not None]
    passes = [turn.layer_passes for turn in turns if turn.layer_passes is not None]
    return {
        "index": 0,
        "turns": list(texts),
        "decoding_steps": [len(turn.accept_lengths or ()) for turn in turns],
        "new_tokens": [len(turn.tokens) for turn in turns],
        "wall_time": [turn.seconds for turn in turns],
        "accept_lengths": [n for turn in turns for n in turn.accept_lengths or ()],
        "tokens": [turn.tokens for turn in turns],
        "step_seconds": [[round(s, 7) for s in turn.step_seconds or ()] for turn in turns],
        "prefill_seconds": [turn.prefill_seconds for turn in turns],
        "stage_seconds": {name: sum(each[name] for each in stages) for name in stages[0]} if stages else None,
        "layer_passes": sum(passes) if len(passes) == len(turns) else None,
        "stats": _stats_record(sum(stats, SpecStats())) if stats else None,
    }


def item_of(answer: Mapping[str, Any]) -> Item:
    """Read the first choice of an answer, as Spec-Bench's script does.

    Raises:
        ValueError: a key of Spec-Bench's format is missing, or the time is 0.
    """
    try:
        choice = answer["choices"][0]
        tokens, seconds = sum(choice["new_tokens"]), sum(choice["wall_time"])
        lengths = list(choice["accept_lengths"])
        question_id, category = answer["question_id"], answer["category"]
    except (KeyError, TypeError, IndexError) as problem:
        raise ValueError(f"no answer in Spec-Bench's format ({problem!r}): {str(answer)[:80]}") from problem
    if not seconds > 0:
        raise ValueError(f"question {question_id!r} took {seconds} s; the time of an answer must be above 0")
    prefill = choice.get("prefill_seconds") or [None]
    return Item(
        question_id,
        category,
        tokens,
        seconds,
        lengths,
        _steps(lengths, choice.get("step_seconds")),
        None if None in prefill else sum(prefill),
        choice.get("stage_seconds"),
        choice.get("layer_passes"),
        None if choice.get("stats") is None else _stats(choice["stats"]),
    )


def _steps(lengths: Sequence[int], seconds: Any) -> list[list[tuple[int, float]]] | None:
    if not seconds or not all(seconds) or sum(map(len, seconds)) != len(lengths):
        return None
    sizes = iter(lengths)
    return [[(next(sizes), each) for each in turn] for turn in seconds]


def _stats_record(stats: SpecStats) -> dict[str, Any]:
    histogram = {
        str(d): {str(a): n for a, n in c.items()} for d, c in stats.acceptance_histogram_by_draft_length.items()
    }
    return {
        "num_generated_tokens": stats.num_generated_tokens,
        "num_plain_steps": stats.num_plain_steps,
        "acceptance_histogram_by_draft_length": histogram,
    }


def _stats(record: Mapping[str, Any]) -> SpecStats:
    given = record["acceptance_histogram_by_draft_length"]
    histogram = {int(d): Counter({int(a): n for a, n in counts.items()}) for d, counts in given.items()}
    return SpecStats(histogram, record["num_plain_steps"], record["num_generated_tokens"])


def groups(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Group items by category in order of appearance; adds `mt_bench` (its eight categories) and `overall`."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.category, []).append(item)
    merged = [item for item in items if item.category in MT_BENCH]
    if merged and len(merged) < len(items):
        found["mt_bench"] = merged
    return {**found, "overall": list(items)}
