"""`Material`: some questions of a run with the traces of what the model writes after them, made when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from eval import live_timing
from eval.methods import Endless
from eval.questions import Question
from eval.run.config import RunConfig
from eval.run.loop import Scene, prompt_of
from eval.run.turns import Failure, Prompt
from eval.tasks import trace_of
from eval.timing import Say
from eval.traces import Trace
from selfspec.control.costs import Costs
from selfspec.executors.pick import Sampling
from selfspec.legacy import LoadedTarget as Target

Thing = TypeVar("Thing")


@dataclass(slots=True)
class Material:
    """What studies share.

    Attributes:
        tokens: new tokens per question that a study decodes live.
        longest: new tokens per question that are recorded, as far as the context lets it; at least `tokens`.
        costs: those of one row, measured at the first call.
        cost_repeats: how often a study times a piece for costs of its own; 0: the table in the user's cache.
        eos: tokens that end an answer; empty: nothing does.
    """

    target: Endless
    prompts: Sequence[Prompt]
    temperature: float
    tokens: int
    longest: int
    costs: Callable[[], Costs]
    cost_repeats: int
    say: Say
    eos: frozenset[int] = frozenset()
    _traces: list[Trace] = field(default_factory=list, init=False)

    @property
    def num_layers(self) -> int:
        return self.target.stack.num_layers

    def traces(self, num_tokens: int) -> list[Trace]:
        """A trace per prompt, of up to `num_tokens` tokens (at most `longest`), past any end of text."""
        if not self._traces:
            traces = []
            for i, prompt in enumerate(self.prompts):
                self.say(f"studies: recording question {i + 1} of {len(self.prompts)}")
                sampling = Sampling(self.temperature, seed=prompt.seed)
                traces.append(trace_of(self.target, prompt.ids, self.longest, sampling, "run"))
            self._traces = traces
        return [trace.cut(num_tokens) for trace in self._traces]

    def answers(self) -> list[Trace]:
        """A trace per prompt, of up to `longest` tokens, ended as the run's answers are: with the first end of text."""
        traces = self.traces(self.longest)
        ends = [[i for i, token in enumerate(trace.tokens, 1) if token in self.eos] for trace in traces]
        return [trace.cut(at[0]) if at else trace for trace, at in zip(traces, ends, strict=True)]

    def scene(self, num_tokens: int, costs: Costs) -> live_timing.Scene:
        """The same to be decoded live and replayed."""
        prompts, seeds = [prompt.ids for prompt in self.prompts], [prompt.seed for prompt in self.prompts]
        traces = self.traces(num_tokens)
        return live_timing.Scene(self.target, prompts, traces, costs, self.temperature, seeds)


def material(
    target: Target,
    asked: Sequence[Question],
    scene: Scene,
    config: RunConfig,
    costs: Callable[[], Costs],
    say: Say,
) -> Material:
    """The first turns of `config.study_questions` questions, those left out that the context has no room for.

    Raises:
        ValueError: no question fits the context.
    """
    fitting: list[tuple[Question, Prompt]] = []
    for i, question in enumerate(asked):
        try:
            fitting.append((question, prompt_of(question, 0, [], scene, i)))
        except Failure:
            continue
    if not fitting:
        raise ValueError(f"no question leaves room for a token in the model's context of {scene.context_limit}")
    prompts = [fitting[i][1] for i in choose([question.category for question, _ in fitting], config.study_questions)]
    longest = max(config.max_new_tokens, config.study_tokens)
    sizes = {"tokens": config.study_tokens, "longest": longest, "cost_repeats": config.cost_repeats}
    eos = frozenset[int]() if config.ignore_eos else target.eos_token_ids
    return Material(Endless(target), prompts, config.temperature, costs=costs, say=say, eos=eos, **sizes)


def choose(categories: Sequence[str], count: int) -> list[int]:
    """Indices, ascending, of `count` questions (or all there are): evenly over the categories, and within each.

    Every category is in if there are no more than `count`.
    """
    members: dict[str, list[int]] = {}
    for i, category in enumerate(categories):
        members.setdefault(category, []).append(i)
    chosen = _spread(list(members), count)
    shares = dict.fromkeys(chosen, 0)
    left = min(count, len(categories))
    while left:
        for category in chosen:
            if left and shares[category] < len(members[category]):
                shares[category], left = shares[category] + 1, left - 1
    return sorted(i for category in chosen for i in _spread(members[category], shares[category]))


def _spread(things: Sequence[Thing], count: int) -> list[Thing]:
    count = min(count, len(things))
    return [things[i * len(things) // count] for i in range(count)]
