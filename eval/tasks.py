"""Tasks for replay: prompts decoded and recorded, or traces read from files, each with the costs of its model here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval import environment
from eval.bench import check_room
from eval.config import ReplayConfig, Task
from eval.methods import Endless
from eval.questions import encode, read_questions
from eval.recording import prior_of, record
from eval.timing import Say
from eval.traces import Trace, load, load_prior, save
from selfspec.calibrate.measure import measure
from selfspec.control.acceptance import is_prior
from selfspec.control.costs import Costs
from selfspec.executors.pick import Sampling
from selfspec.legacy import LoadedTarget as Target
from selfspec.legacy import opened as load_model


class Recorded(NamedTuple):
    """A task that is ready to be replayed."""

    name: str
    traces: list[Trace]
    costs: Costs
    exit_layer: int | None = None  # stored with the model, if it was opened
    num_draft_tokens: int | None = None
    model: dict[str, Any] | None = None
    prior: Any = None  # statistics stored with the model, from which its policies start

    @property
    def num_layers(self) -> int:
        return self.costs.num_layers

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for the record; the traces themselves are left out."""
        return {
            "name": self.name,
            "model": self.model,
            "num_layers": self.num_layers,
            "num_prompts": len(self.traces),
            "num_tokens": sum(len(trace.tokens) for trace in self.traces),
            "costs": self.costs.as_dict(),
            "has_prior": self.prior is not None,
        }


def gather(
    config: ReplayConfig, traces: Sequence[str], costs: str | None, folder: str | None, say: Say
) -> list[Recorded]:
    """Every task of the traces' files, or of the configuration where there are none.

    Args:
        traces: files that `save` wrote.
        costs: a JSON file of one model's costs, or of costs by task; without it they are measured.
        folder: where to save the traces of what is decoded here.

    Raises:
        ValueError: a file cannot be read, or a task has no costs or those of another model.
    """
    known = read_costs(costs) if costs else {}
    recorded: dict[str, list[Trace]] = {}
    priors: dict[str, Any] = {}
    for path in traces:
        prior = load_prior(path)
        for trace in load(path):
            recorded.setdefault(trace.task, []).append(trace)
            priors.setdefault(trace.task, prior)
    models = {task.name: task for task in config.tasks}
    done = []
    for name in recorded or models:
        own = known.get(name, known.get(""))
        if name in recorded and own is not None:
            done.append(_checked(Recorded(name, recorded[name], own, prior=priors[name])))
        else:
            done.append(_task(config, name, models.get(name), recorded.get(name), own, say))
        if folder and name not in recorded:
            Path(folder).mkdir(parents=True, exist_ok=True)
            save(done[-1].traces, Path(folder) / f"{name}.npz", done[-1].prior)
    if not done:
        raise ValueError("there is nothing to replay: give tasks in the configuration, or --traces FILE")
    return done


def _task(
    config: ReplayConfig, name: str, task: Task | None, traces: list[Trace] | None, costs: Costs | None, say: Say
) -> Recorded:
    """What is missing of a task's traces and costs is made with its model."""
    if task is None:
        raise ValueError(f"the task {name!r} has no costs: give --costs FILE, or --task {name} MODEL QUESTIONS")
    say(f"{name}: loading {task.model}")
    target = load_model(task.model, device=config.device or None, dtype=config.dtype)
    traces = traces or decode(target, task, config, say)
    if costs is None:
        say(f"{name}: measuring costs")
        costs = measure(target.stack, repeats=config.repeats, within=None)
    about = environment.model(target, task.model)
    told = target.default_exit_layer, target.default_num_draft_tokens
    return _checked(Recorded(name, traces, costs, *told, about, prior_of(target)))


def _checked(task: Recorded) -> Recorded:
    for has in {trace.num_layers for trace in task.traces} - {task.num_layers}:
        raise ValueError(f"the costs of the task {task.name!r} are of {task.num_layers} layers, its traces of {has}")
    if task.prior is not None and not is_prior(task.prior, task.num_layers):
        raise ValueError(f"the statistics beside the traces of the task {task.name!r} are of another model or version")
    return task


def decode(target: Target, task: Task, config: ReplayConfig, say: Say) -> list[Trace]:
    """Plain decoding of every prompt, as far as the longest length and the model's context let it, and its traces."""
    prompts = encode(read_questions(task.questions, config.num_questions), target.tokenizer)
    check_room(target, prompts, 1)
    endless, done = Endless(target), []
    for i, prompt in enumerate(prompts):
        say(f"{task.name}: prompt {i + 1} of {len(prompts)}")
        sampling = Sampling(config.temperature, seed=config.seed + i)
        done.append(trace_of(endless, prompt, max(config.lengths), sampling, task.name))
    return done


def trace_of(target: Endless, prompt: Sequence[int], num_tokens: int, sampling: Sampling, task: str) -> Trace:
    """The trace of what plain decoding writes after a prompt, up to `num_tokens` as far as the context lets it."""
    room = min(num_tokens, target.stack.context_limit - len(prompt))
    options = {"max_new_tokens": room, "temperature": sampling.temperature, "seed": sampling.seed}
    (answer,) = target.generate([prompt], policy="plain", **options)  # type: ignore[arg-type]
    return record(target.stack, prompt, answer.tokens, sampling, task)


def read_costs(path: str) -> dict[str, Costs]:
    """Costs by task; the name '' is for every task that has none of its own."""
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        if isinstance(content, dict) and content and "num_layers" not in content:
            return {str(name): Costs.from_dict(given) for name, given in content.items()}
        return {"": Costs.from_dict(content)}
    except (OSError, ValueError) as problem:
        raise ValueError(f"cannot read the costs {path!r}: {problem}") from problem
