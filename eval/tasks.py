"""Tasks for replay: prompts, the traces of what a model writes after them, and what its rounds cost on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from eval import environment
from eval.config import Common, check, check_least, option
from eval.models import Endless, Ids, decode, measured_costs, open_target
from eval.questions import encode, read_questions
from eval.recording import prior_of, record
from eval.replay import parse_policy
from eval.timing import Say
from eval.traces import Trace, load, save
from selfspec.control.acceptance import is_prior
from selfspec.control.costs import Costs
from selfspec.executors.pick import Sampling
from selfspec.target import Target

MEASURED, STORED = "measured", "stored"


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of text: the model that writes it, and the questions that it continues."""

    name: str = option("", "What tables call it.")
    model: str = option("demo", "What selfspec.load opens.")
    questions: str = option("", "A question file.", is_file=True)


@dataclass(frozen=True, slots=True)
class TaskConfig(Common):
    """What commands over tasks share."""

    tasks: list[Task] = option([], "Kinds of text, each with a name, a model and a question file.")


def check_tasks(config: TaskConfig) -> None:
    """ValueError unless the tasks have names, each its own."""
    names = [task.name for task in config.tasks]
    check(len(set(names)) == len(names) and all(names), "tasks", "of different names", names)


@dataclass(frozen=True, slots=True)
class ReplayConfig(TaskConfig):
    """One comparison of policies by replay."""

    lengths: tuple[int, ...] = option((128, 512), "Tokens per prompt, as far as a model's context holds them.")
    temperature: float = option(0.0, "How the outputs are picked: 0 is greedy, else they are sampled.")
    seed: int = option(0, "Seed of the first prompt's sampled output; the next prompt has the next seed.")
    head_layers: tuple[str, ...] = option(
        (MEASURED, "0", "0.5", "1", "2", "4"), "Costs of the output head, in layers; 'measured': as it is here."
    )
    policies: tuple[str, ...] = option(
        (), "Policies to compare, such as adaptive:exit+tree for some sources of drafts; empty: all there are."
    )
    prior: str = option(STORED, "Statistics that a policy begins with: 'stored' with its model, or 'none'.")
    exit_layer: int = option(0, "Exit layer of policies that do not choose it; 0: stored with the model, or a quarter.")
    num_draft_tokens: int = option(0, "Draft length of such policies; 0: stored with the model, or 4.")
    repeats: int = option(15, "How often every piece of a round is timed.")

    def __post_init__(self) -> None:
        check_tasks(self)
        check_least(self, 0, "threads", "num_questions", "exit_layer", "num_draft_tokens", "temperature")
        check_least(self, 1, "repeats")
        fits = bool(self.lengths) and all(n >= 1 for n in self.lengths)
        check(fits, "lengths", "numbers of at least 1", list(self.lengths))
        fits = bool(self.head_layers) and all(map(_is_head, self.head_layers))
        check(fits, "head_layers", f"numbers of at least 0, or {MEASURED!r}", list(self.head_layers))
        check(self.prior in (STORED, "none"), "prior", f"{STORED!r} or 'none'", self.prior)
        for name in self.policies:
            parse_policy(name)


def _is_head(text: str) -> bool:
    try:
        return text == MEASURED or (isfinite(float(text)) and float(text) >= 0)
    except ValueError:
        return False


class Recorded(NamedTuple):
    """A task whose outputs are recorded, ready to be replayed."""

    name: str
    traces: list[Trace]
    costs: Costs
    exit_layer: int | None = None  # stored with the model, if it was opened
    num_draft_tokens: int | None = None
    model: dict[str, Any] | None = None
    prior: Any = None  # acceptance statistics stored with the model, from which its policies start

    @property
    def num_layers(self) -> int:
        return self.costs.num_layers

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the record; the traces are left out."""
        return {
            "name": self.name,
            "model": self.model,
            "num_layers": self.num_layers,
            "num_prompts": len(self.traces),
            "num_tokens": sum(len(trace.tokens) for trace in self.traces),
            "is_sampled": any(trace.is_sampled for trace in self.traces),
            "costs": self.costs.as_dict(),
            "has_prior": self.prior is not None,
        }


def open_task(task: Task, config: TaskConfig, say: Say) -> tuple[Target, Ids]:
    """The task's model and its prompts.

    Raises:
        ValueError: the model or the questions cannot be opened, or a prompt fills the model's context.
    """
    say(f"{task.name}: loading {task.model}")
    target = open_target(task.model, config)
    prompts = encode(read_questions(task.questions, config.num_questions), target.tokenizer)
    longest, limit = max(map(len, prompts)), target.stack.context_limit
    if longest >= limit:
        raise ValueError(f"the task {task.name!r} has a prompt of {longest} tokens; its model's context holds {limit}")
    return target, prompts


def trace_of(target: Endless, prompt: Sequence[int], num_tokens: int, sampling: Sampling, task: str = "") -> Trace:
    """The trace of what plain decoding writes after a prompt, up to `num_tokens` as far as the context lets it."""
    room = min(num_tokens, target.stack.context_limit - len(prompt))
    (answer,) = decode(target, [prompt], room, temperature=sampling.temperature, seeds=sampling.seed)
    return record(target.stack, prompt, answer.tokens, sampling, task)


def save_traces(traces: Sequence[Trace], folder: str, task: str, prior: Any) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    save(traces, Path(folder) / f"{task}.npz", prior)


def gather(
    config: ReplayConfig, traces: Sequence[str], costs: str | None, folder: str | None, say: Say
) -> list[Recorded]:
    """Every task of the trace files, or of the configuration where there are none.

    Args:
        traces: files that `eval.traces.save` wrote; empty: the tasks' prompts are decoded.
        costs: a JSON file of one model's costs, or of costs by task; None: they are measured.
        folder: where to save the traces of what is decoded; None: nowhere.

    Raises:
        ValueError: a file cannot be read, or a task has no costs or those of another model.
    """
    known = read_costs(costs) if costs else {}
    recorded: dict[str, list[Trace]] = {}
    priors: dict[str, Any] = {}
    for path in traces:
        found, prior = load(path)
        for trace in found:
            recorded.setdefault(trace.task, []).append(trace)
            priors.setdefault(trace.task, prior)
    models = {task.name: task for task in config.tasks}
    done = []
    for name in recorded or models:
        own = known.get(name, known.get(""))
        if name in recorded and own is not None:
            done.append(_checked(Recorded(name, recorded[name], own, prior=priors[name])))
            continue
        if name not in models:
            raise ValueError(f"the task {name!r} has no costs: give --costs FILE, or --task {name} MODEL QUESTIONS")
        done.append(_made(models[name], config, recorded.get(name), own, say))
        if folder and name not in recorded:
            save_traces(done[-1].traces, folder, name, done[-1].prior)
    if not done:
        raise ValueError("there is nothing to replay: give tasks in the configuration, or --traces FILE")
    return done


def _made(task: Task, config: ReplayConfig, traces: list[Trace] | None, costs: Costs | None, say: Say) -> Recorded:
    """A task whose missing traces and costs are made with its model."""
    target, prompts = open_task(task, config, say)
    if traces is None:
        traces, endless = [], Endless(target)
        for i, prompt in enumerate(prompts):
            say(f"{task.name}: prompt {i + 1} of {len(prompts)}")
            sampling = Sampling(config.temperature, seed=config.seed + i)
            traces.append(trace_of(endless, prompt, max(config.lengths), sampling, task.name))
    if costs is None:
        say(f"{task.name}: measuring costs")
        costs = measured_costs(target, (1,), config.repeats)
    about = environment.model(target, task.model)
    stored = target.default_exit_layer, target.default_num_draft_tokens
    return _checked(Recorded(task.name, traces, costs, *stored, about, prior_of(target)))


def _checked(task: Recorded) -> Recorded:
    for has in {trace.num_layers for trace in task.traces} - {task.num_layers}:
        raise ValueError(f"the costs of the task {task.name!r} are of {task.num_layers} layers, its traces of {has}")
    if task.prior is not None and not is_prior(task.prior, task.num_layers):
        raise ValueError(f"the statistics beside the traces of the task {task.name!r} are of another model or version")
    return task


def read_costs(path: str) -> dict[str, Costs]:
    """Costs by task; the name '' is for every task that has none of its own.

    Raises:
        ValueError: the file cannot be read, or holds no costs.
    """
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        if isinstance(content, dict) and content and "num_layers" not in content:
            return {str(name): Costs.from_dict(given) for name, given in content.items()}
        return {"": Costs.from_dict(content)}
    except (OSError, ValueError) as problem:
        raise ValueError(f"cannot read the costs {path!r}: {problem}") from problem
