"""What a method is asked and answers; and an answer as a line of a file in Spec-Bench's format, with keys of our own.

`Prompt` is one turn to be continued, `Turn` a method's answer to it. A `Method` is a callable from one to the other.
`choice_of` writes the turns of a question down, `item_of` reads such a line as an `Item`, from which figures are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from selfspec.decoding.stats import SpecStats

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
Row = dict[str, Any]


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


class Item(NamedTuple):
    """One question, answered by one method; its turns are added up. None is what is not known."""

    question_id: int | str
    category: str
    num_tokens: int
    seconds: float
    accept_lengths: list[int]
    retokenised: int | None  # tokens of the answers' texts less one per turn, as Spec-Bench counts its baseline
    steps: list[list[tuple[int, float]]] | None  # per turn: (tokens, seconds) of every step
    prefill_seconds: float | None
    stage_seconds: dict[str, float] | None
    layer_passes: int | None
    stats: SpecStats | None

    @property
    def speed(self) -> float:
        """Tokens per second, prefill included."""
        return self.num_tokens / self.seconds


def choice_of(turns: Sequence[Turn], texts: Sequence[str], text_tokens: Sequence[int]) -> dict[str, Any]:
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
        "is_text": [turn.text is not None for turn in turns],
        "text_tokens": list(text_tokens),
        "step_seconds": [[round(s, 7) for s in turn.step_seconds or ()] for turn in turns],
        "prefill_seconds": [turn.prefill_seconds for turn in turns],
        "stage_seconds": {name: sum(each[name] for each in stages) for name in stages[0]} if stages else None,
        "layer_passes": sum(passes) if len(passes) == len(turns) else None,
        "stats": _stats_record(sum(stats, SpecStats())) if stats else None,
        "asked_seconds": [turn.asked_seconds for turn in turns],
    }


def item_of(answer: Mapping[str, Any]) -> Item:
    """An answer's figures, of its first choice, as Spec-Bench's script reads it.

    Raises:
        ValueError: a key of Spec-Bench's is missing or no time was taken.
    """
    try:
        choice = answer["choices"][0]
        tokens, seconds = sum(choice["new_tokens"]), sum(choice["wall_time"])
        lengths = list(choice["accept_lengths"])
        own = answer["question_id"], answer["category"]
    except (KeyError, TypeError, IndexError) as problem:
        raise ValueError(f"no answer in Spec-Bench's format ({problem!r}): {str(answer)[:80]}") from problem
    if not seconds > 0:
        raise ValueError(f"question {own[0]!r} took {seconds} s, which no answer does")
    retokenised, prefill = choice.get("text_tokens"), choice.get("prefill_seconds") or [None]
    return Item(
        *own,
        tokens,
        seconds,
        lengths,
        None if retokenised is None else sum(retokenised) - len(retokenised),
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
    histogram = stats.acceptance_histogram_by_draft_length
    return {
        "num_generated_tokens": stats.num_generated_tokens,
        "num_plain_steps": stats.num_plain_steps,
        "acceptance_histogram_by_draft_length": {
            str(d): {str(a): n for a, n in c.items()} for d, c in histogram.items()
        },
    }


def _stats(record: Mapping[str, Any]) -> SpecStats:
    given = record["acceptance_histogram_by_draft_length"]
    histogram = {int(d): Counter({int(a): n for a, n in counts.items()}) for d, counts in given.items()}
    return SpecStats(histogram, record["num_plain_steps"], record["num_generated_tokens"])


def groups(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Items by category in order of appearance; `mt_bench`, its eight categories together, and last `overall`."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.category, []).append(item)
    merged = [item for item in items if item.category in MT_BENCH]
    if merged and len(merged) < len(items):
        found["mt_bench"] = merged
    return {**found, "overall": list(items)}


def worked_seconds(answer: Row) -> float:
    """What an answer took by the harness's clock."""
    choice = answer["choices"][0]
    asked = choice.get("asked_seconds") or [None] * len(choice["wall_time"])
    pairs = zip(choice["wall_time"], asked, strict=True)
    return float(sum(wall if round_trip is None else round_trip for wall, round_trip in pairs))
