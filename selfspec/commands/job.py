"""`Job`: tokenized prompts and how to continue them, ready to run as often as wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from selfspec import hub
from selfspec.api import Target
from selfspec.commands.failure import as_sentences
from selfspec.commands.options import Generate
from selfspec.commands.prompts import Prompt, tokenize, wants_chat
from selfspec.decoding.request import Completion
from selfspec.decoding.results import Round, RowResult
from selfspec.decoding.rounds import Seconds
from selfspec.decoding.stats import SpecStats

MAX_ROWS = 64  # of a file of prompts decoded together; the others join as rows end
STAGES = tuple(field.name for field in fields(Seconds) if not field.name.startswith("_"))


@dataclass(frozen=True, slots=True)
class Run:
    """What a job gave: completions in the prompts' order, and where the time went."""

    completions: list[Completion]
    stages: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())

    @property
    def tokens(self) -> list[int]:
        """Every row's new tokens, end to end."""
        return [token for completion in self.completions for token in completion.tokens]

    @property
    def stats(self) -> SpecStats:
        return sum((completion.stats for completion in self.completions), SpecStats())


@dataclass(frozen=True, slots=True)
class Job:
    """The same rows every time it runs; only the policy may change, which must not change a token."""

    target: Target
    prompts: list[Prompt]
    ids: list[list[int]]
    policy: str
    chat: bool
    options: dict[str, Any]

    @classmethod
    def make(cls, options: Generate, prompts: list[Prompt]) -> Job:
        """Load the model and tokenize; what does not fit it is refused here, before anything is written."""
        with as_sentences():
            target = hub.load(options.model, dtype=options.dtype, device=options.device, adapter=options.adapter)
        chat = wants_chat(target.tokenizer, options)
        with hub.quiet():
            ids = tokenize(prompts, target.tokenizer, options.system, chat, target.stack.context_limit)
        names = ("exit_layer", "num_draft_tokens", "temperature", "top_k", "top_p", "min_p")
        given = {name: getattr(options, name) for name in names} | {"stop": options.stop or []}
        given["seed"] = [options.seed if p.seed is None else p.seed for p in prompts]
        given["max_new_tokens"] = [p.max_new_tokens or options.max_new_tokens for p in prompts]
        return cls(target, prompts, ids, options.policy, chat, given)

    def rounds(self, policy: str | None = None, **changes: Any) -> Iterator[Round]:
        """The rounds of one run; refuses bad options at the call."""
        options = self.options | changes
        with as_sentences():
            return self.target.stream(self.ids, policy=policy or self.policy, max_batch_size=MAX_ROWS, **options)

    def run(self, policy: str | None = None, **changes: Any) -> Run:
        """One run that shows nothing."""
        return consume(self.rounds(policy, **changes), lambda row: None)


def consume(rounds: Iterator[Round], show: Callable[[RowResult], None]) -> Run:
    """Show every row's part of every round; the time that showing takes is not counted."""
    done: list[Completion] = []
    stages: Counter[str] = Counter()
    for round_ in rounds:
        for stage in STAGES:
            stages[stage] += getattr(round_.seconds, stage)
        for row in round_.rows:
            show(row)
            if row.completion is not None:
                done.append(row.completion)
    return Run(sorted(done, key=lambda completion: completion.request_id), dict(stages))
