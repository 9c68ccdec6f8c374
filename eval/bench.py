"""The side-by-side benchmark: one process, one checkpoint, the same prompts, all methods in turn.

A coarse pass tries the whole grid of settings once on a few prompts; the best of each family then meet in the full,
repeated comparison, whose figures alone are reported as results. Batches, the attribution of time to stages, and
start-up follow as stages of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from eval import methods, recording, traces
from eval.attribution import attribute
from eval.config import BenchConfig
from eval.environment import environment, load_average
from eval.methods import Endless, Ids, Method, OneByOne, SelfSpec, Transformers
from eval.summary import differences, of_method, seconds_by_repeat, spread, stats_of, tokens_per_second
from eval.timing import Say, Timings, interleave
from selfspec.legacy import LoadedTarget as Target

GRIDS = ("fixed", "early_exit", "prompt_lookup")  # families with settings to choose


class Scene(NamedTuple):
    """What every stage needs."""

    target: Endless
    model: Any
    prompts: Ids
    reference: list[list[int]]  # plain decoding's tokens per prompt: what every output is compared with
    config: BenchConfig
    say: Say

    @property
    def device(self) -> torch.device:
        return self.target.stack.device

    def time(self, candidates: Sequence[Method], items: Sequence[Ids], repeats: int) -> Timings:
        tokens, warmup = self.config.max_new_tokens, self.config.warmup_tokens
        return interleave(candidates, items, tokens, repeats, warmup, self.device, self.say)

    def rows(self, candidates: Sequence[Method], timings: Timings) -> list[dict[str, Any]]:
        return [method_record(method, timings, self.reference) for method in candidates]


class Stage(NamedTuple):
    """A stage's timings, and a record for every method in it."""

    timings: Timings
    rows: list[dict[str, Any]]


def run(target: Target, prompts: Ids, config: BenchConfig, say: Say, folder: str | None = None) -> dict[str, Any]:
    """All stages but start-up; the record holds plain numbers only.

    Args:
        folder: where to save traces of what plain decoding wrote; None: nowhere.

    Raises:
        ValueError: exit layers that the model does not have, or prompts that leave no room for the new tokens.
    """
    check_room(target, prompts, config.max_new_tokens)
    config.exits_of(target.stack.num_layers)
    record: dict[str, Any] = {"environment": environment(target, config.model), "config": dataclasses.asdict(config)}
    endless = Endless(target)
    say("plain decoding, for reference")
    answers = OneByOne(methods.plain(endless), "reference")(prompts, config.max_new_tokens)
    scene = Scene(endless, target.stack.model, prompts, [answer.tokens for answer in answers], config, say)
    coarse, finalists = coarse_pass(scene)
    full = comparison(scene, finalists)
    best = best_of(finalists, full.rows, "fixed")
    assert isinstance(best, SelfSpec)
    batch = batch_comparison(scene, best)
    say("attribution of time to stages")
    stages = attribution(scene, best, target)
    record["environment"]["load_average_at_end"] = load_average()
    if folder is not None:
        record_traces(scene, Path(folder))
    lengths = [len(prompt) for prompt in prompts]
    record["prompts"] = {"count": len(prompts), "shortest": min(lengths), "longest": max(lengths)}
    record |= {"coarse": coarse.rows, "comparison": full.rows, "batch": batch.rows, "attribution": stages}
    return {**record, "timings": {"comparison": full.timings.samples, "batch": batch.timings.samples}}


def record_traces(scene: Scene, folder: Path) -> None:
    """Save traces of the reference, under the name of the question file."""
    scene.say("recording traces")
    name, stack = Path(scene.config.questions).stem, scene.target.stack
    pairs = zip(scene.prompts, scene.reference, strict=True)
    folder.mkdir(parents=True, exist_ok=True)
    recorded = [recording.record(stack, prompt, tokens, task=name) for prompt, tokens in pairs]
    traces.save(recorded, folder / f"{name}.npz", recording.prior_of(scene.target))


def check_room(target: Target, prompts: Ids, max_new_tokens: int) -> None:
    longest, limit = max(len(prompt) for prompt in prompts), target.stack.context_limit
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens must be at most {limit - longest} for this model and its longest prompt, "
            f"got {max_new_tokens}"
        )


def candidates(scene: Scene) -> list[Method]:
    """Everything the coarse pass tries: the two baselines and every family's grid."""
    config, model = scene.config, scene.model
    exits = config.exits_of(scene.target.stack.num_layers)
    grid: list[Method] = [methods.plain(scene.target), methods.generate(model)]
    grid += [methods.fixed(scene.target, e, d) for e in exits for d in config.draft_lengths]
    grid += [methods.early_exit(model, e, d) for e in exits for d in config.early_exit_draft_lengths]
    grid += [methods.prompt_lookup(model, n) for n in config.lookup_lengths]
    return grid


def coarse_pass(scene: Scene) -> tuple[Stage, list[Method]]:
    """Try every setting once on a few prompts; returns the records and the methods that go on."""
    tried = candidates(scene)
    scene.say(f"coarse pass: {len(tried)} methods")
    timings = scene.time(tried, [[prompt] for prompt in scene.prompts[: scene.config.coarse_questions]], repeats=1)
    rows = scene.rows(tried, timings)
    going = [tried[0], tried[1]]
    for family in GRIDS:
        fastest = ranked(tried, rows, family)
        going += fastest[: scene.config.finalists if family == "fixed" else 1]
    for row in rows:
        row["goes_on"] = any(method.name == row["method"] for method in going)
    return Stage(timings, rows), going


def ranked(tried: Sequence[Method], rows: Sequence[dict[str, Any]], family: str) -> list[Method]:
    """A family's methods, fastest first; those that failed are left out."""
    pairs = [(row, method) for row, method in zip(rows, tried, strict=True) if method.family == family]
    done = [(row["tokens_per_second"], method) for row, method in pairs if "error" not in row]
    return [method for _, method in sorted(done, key=lambda pair: -pair[0])]


def best_of(tried: Sequence[Method], rows: Sequence[dict[str, Any]], family: str) -> Method:
    return ranked(tried, rows, family)[0]


def comparison(scene: Scene, finalists: Sequence[Method]) -> Stage:
    """The full comparison at batch 1: every finalist on every prompt, repeated."""
    scene.say(f"full comparison: {', '.join(method.name for method in finalists)}")
    timings = scene.time(finalists, [[prompt] for prompt in scene.prompts], scene.config.repeats)
    return Stage(timings, scene.rows(finalists, timings))


def batch_comparison(scene: Scene, best: SelfSpec) -> Stage:
    """A ragged batch decoded together, beside the same prompts one by one.

    One row's best setting is not a batch's, where verifying many tokens is no longer nearly free, so the fixed grid is
    tried once on the batch and its fastest setting is the one decoded together.
    """
    prompts = scene.prompts[: scene.config.batch_size]
    scene.say(f"batch comparison: {len(prompts)} prompts")
    plain, generate = methods.plain(scene.target), methods.generate(scene.model)
    grid = [method for method in candidates(scene) if method.family == "fixed"]
    coarse = scene.time(grid, [prompts], repeats=1)
    shared = best_of(grid, scene.rows(grid, coarse), "fixed")
    assert isinstance(shared, SelfSpec)
    alone: list[SelfSpec | Transformers] = [plain, best, generate]
    joined: list[SelfSpec | Transformers] = [plain, shared, generate]
    tried: list[Method] = [OneByOne(m, f"{m.name}, one by one") for m in alone]
    tried += [dataclasses.replace(m, name=f"{m.name}, {len(prompts)} together") for m in joined]
    timings = scene.time(tried, [prompts], scene.config.batch_repeats)
    return Stage(timings, scene.rows(tried, timings))


def attribution(scene: Scene, best: SelfSpec, target: Target) -> list[dict[str, Any]]:
    """Stage shares of plain decoding and of the best fixed policy: alone, with text on top, and in a batch."""
    few = scene.prompts[: scene.config.coarse_questions]
    batch = scene.prompts[: scene.config.batch_size]
    with_text = dataclasses.replace(best, target=Endless(target, with_text=True), name=f"{best.name}, with text")
    watched: list[tuple[SelfSpec, Sequence[Ids]]] = [
        (methods.plain(scene.target), [[p] for p in few]),
        (best, [[p] for p in few]),
        (with_text, [[p] for p in few]),
        (dataclasses.replace(best, name=f"{best.name}, {len(batch)} together"), [batch]),
    ]
    return attribute(watched, scene.config.max_new_tokens, scene.config.batch_repeats)


def method_record(method: Method, timings: Timings, reference: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A method's figures in one stage, or why there are none."""
    head = {"method": method.name, "family": method.family, "settings": dict(method.settings)}
    if method.name in timings.errors:
        return {**head, "error": timings.errors[method.name]}
    samples = of_method(timings.samples, method.name)
    tokens = sum(s.num_tokens for s in samples if s.repeat == 0)
    stats = stats_of(samples)
    found = differences(samples, reference)
    return {
        **head,
        "tokens_per_second": tokens_per_second(samples),
        "tokens_per_second_by_repeat": spread(tokens / s for s in seconds_by_repeat(samples))._asdict(),
        "stats": None if stats is None else stats.as_dict(),
        "differing_prompts": len(found),
        "first_differences": [difference._asdict() for difference in found],
    }
