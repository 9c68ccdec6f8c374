"""Tasks of `python -m eval replay`: a model and its questions, recorded as traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eval import measurement
from eval.config import Common
from eval.measurement import Say
from eval.models import Ids, decode, measured_costs, open_llm, with_policy
from eval.questions import encode, is_file, read_questions
from eval.recording import prior_of, record
from eval.replay import parse_policy
from eval.traces import Trace, load, save
from selfspec import LLM, SamplingParams
from selfspec.control.acceptance import is_prior
from selfspec.control.costs import Costs
from train.configuration import check, check_least, option

STORED = "stored"


@dataclass(frozen=True, slots=True)
class Task:
    """A model and the questions that it continues."""

    name: str = option("", "Name in tables.")
    model: str = option("demo", "Model to open.")
    questions: str = option("", "A question file.", is_file=is_file)


@dataclass(frozen=True, slots=True)
class ReplayConfig(Common):
    """The configuration of `python -m eval replay`."""

    tasks: list[Task] = option([], "Tasks, each with a name, a model and a question file.")
    lengths: tuple[int, ...] = option((128, 512), "Tokens per prompt, limited by the model's context.")
    temperature: float = option(0.0, "Sampling temperature of the outputs; 0 is greedy.")
    seed: int = option(0, "Seed of the first prompt's sampled output; the next prompt has the next seed.")
    policies: tuple[str, ...] = option((), "Policies to compare, such as adaptive:exit+copies; empty: all.")
    prior: str = option(STORED, "Acceptance statistics at a policy's start: 'stored' with its model, or 'none'.")
    exit_layer: int = option(0, "Exit layer of policies that do not choose it; 0: stored with the model, or a quarter.")
    num_speculative_tokens: int = option(0, "Draft length of such policies; 0: stored with the model, or 4.")
    repeats: int = option(15, "How often every piece of a round is timed.")

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        check(len(set(names)) == len(names) and all(names), "tasks", "of different names", names)
        check_least(self, 0, "threads", "num_questions", "exit_layer", "num_speculative_tokens", "temperature")
        check_least(self, 1, "repeats")
        fits = bool(self.lengths) and all(n >= 1 for n in self.lengths)
        check(fits, "lengths", "numbers of at least 1", list(self.lengths))
        check(self.prior in (STORED, "none"), "prior", f"{STORED!r} or 'none'", self.prior)
        for name in self.policies:
            parse_policy(name)


class Recorded(NamedTuple):
    """A task with recorded outputs, ready for replay. The last four fields come from the model, where it was opened."""

    name: str
    traces: list[Trace]
    costs: Costs
    exit_layer: int | None = None
    num_speculative_tokens: int | None = None
    model: dict[str, Any] | None = None
    prior: Any = None  # acceptance statistics

    def as_dict(self) -> dict[str, Any]:
        """The task as plain values, without its traces."""
        return {
            "name": self.name,
            "model": self.model,
            "num_layers": self.costs.num_layers,
            "num_prompts": len(self.traces),
            "num_tokens": sum(len(trace.tokens) for trace in self.traces),
            "is_sampled": any(trace.is_sampled for trace in self.traces),
            "costs": self.costs.as_dict(),
            "has_prior": self.prior is not None,
        }


def open_task(task: Task, config: ReplayConfig, say: Say) -> tuple[LLM, Ids]:
    """Open the task's model and encode its prompts.

    Raises:
        ValueError: the model or the questions cannot be opened, or a prompt fills the model's context.
    """
    say(f"{task.name}: loading {task.model}")
    llm = open_llm(task.model, config)
    prompts = encode(read_questions(task.questions, config.num_questions), llm.tokenizer)
    longest, limit = max(map(len, prompts)), llm.target.split.context_limit
    if longest >= limit:
        raise ValueError(f"the task {task.name!r} has a prompt of {longest} tokens; its model's context holds {limit}")
    return llm, prompts


def trace_of(llm: LLM, prompt: Sequence[int], num_tokens: int, params: SamplingParams, task: str = "") -> Trace:
    """Decode a prompt plainly, up to `num_tokens` or the end of the context, and record the trace."""
    split = llm.target.split
    limit, plain = min(num_tokens, split.context_limit - len(prompt)), with_policy(llm, policy="plain")
    (answer,) = decode(plain, [prompt], limit, temperature=params.temperature or 0.0, seeds=params.seed)
    return record(split, prompt, answer.token_ids, params, task)


def gather(
    config: ReplayConfig, traces: Sequence[str], costs: str | None, folder: str | None, say: Say
) -> list[Recorded]:
    """The tasks of the trace files, or of the configuration where there are none.

    Args:
        traces: files of `eval.traces.save`; empty: the tasks' prompts are decoded.
        costs: a JSON file of one model's costs, or of costs by task; None: they are measured.
        folder: a folder to save new traces in; None: they are not saved.

    Raises:
        ValueError: a file cannot be read, or a task has no costs or those of another model.
    """
    given = read_costs(costs) if costs else {}
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    recorded: dict[str, list[Trace]] = {}
    priors: dict[str, Any] = {}
    for path in traces:
        found, prior = load(path)
        for trace in found:
            recorded.setdefault(trace.task, []).append(trace)
            priors.setdefault(trace.task, prior)
    tasks = {task.name: task for task in config.tasks}
    done = []
    for name in recorded or tasks:
        own = given.get(name, given.get(""))
        if name in recorded and own is not None:
            done.append(_checked(Recorded(name, recorded[name], own, prior=priors[name])))
            continue
        if name not in tasks:
            raise ValueError(f"the task {name!r} has no costs: give --costs FILE, or --task {name} MODEL QUESTIONS")
        done.append(_record_task(tasks[name], config, recorded.get(name), own, say))
        if folder and name not in recorded:
            save(done[-1].traces, Path(folder) / f"{name}.npz", done[-1].prior)
    if not done:
        raise ValueError("there is nothing to replay: give tasks in the configuration, or --traces FILE")
    return done


def _record_task(
    task: Task, config: ReplayConfig, traces: list[Trace] | None, costs: Costs | None, say: Say
) -> Recorded:
    """Open a task's model; record its traces and measure its costs where they are None."""
    llm, prompts = open_task(task, config, say)
    if traces is None:
        traces = []
        for i, prompt in enumerate(prompts):
            say(f"{task.name}: prompt {i + 1} of {len(prompts)}")
            params = SamplingParams(temperature=config.temperature, seed=config.seed + i)
            traces.append(trace_of(llm, prompt, max(config.lengths), params, task.name))
    if costs is None:
        say(f"{task.name}: measuring costs")
        costs = measured_costs(llm, (1,), config.repeats)
    about = measurement.model(llm, task.model)
    target = llm.target
    stored = target.default_exit_layer, target.default_num_speculative_tokens
    return _checked(Recorded(task.name, traces, costs, *stored, about, prior_of(target)))


def _checked(task: Recorded) -> Recorded:
    """The task; ValueError unless traces, costs and statistics are of one model."""
    layers = task.costs.num_layers
    for has in {trace.num_layers for trace in task.traces} - {layers}:
        raise ValueError(f"the costs of the task {task.name!r} are of {layers} layers, its traces of {has}")
    if task.prior is not None and not is_prior(task.prior, layers):
        raise ValueError(f"the statistics in the traces of the task {task.name!r} are of another model or version")
    return task


def read_costs(path: str) -> dict[str, Costs]:
    """Read costs by task; the name '' stands for every task without costs of its own.

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
