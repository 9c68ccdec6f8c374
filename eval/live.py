"""Compare policies live, by batch size, with plain decoding and with predictions of replay: `python -m eval live`.

Speedups are of decoding: the time before the first round and the prefill are subtracted from a live call; a replay has
neither. Replay uses the costs measured before the call's repeat, and adds the interpreter's time in the call. Speedups
of whole calls are reported as well. Stages and prefill are timed by the engine's own clock; on a GPU it measures
launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from eval import measurement
from eval.figures import plot_live
from eval.live_table import render
from eval.live_timing import STAGES, Call, Method, Workload, interleave, workload_of
from eval.measurement import Say, spread
from eval.models import measured_costs
from eval.recording import prior_of
from eval.replay import Replayed, make, parse_policy, replay
from eval.synthetic import random_prompts, synthetic_target
from eval.tasks import Task, TaskConfig, check_tasks, configured, open_task, parser_of, run_command, save_traces
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.registry import CHOOSES_EXIT
from selfspec.decoding.outputs import SpecStats
from train.configuration import check, check_least, option

PLAIN, ADAPTIVE, FIXED, OTHER = "plain", "adaptive", "fixed", "other"
ACCEPTANCES = (1.0, 0.9, 0.7, 0.5, 0.25, 0.05)  # of the synthetic targets, at exit layer 2 of 8
PROMPTS, PROMPT_TOKENS = 8, 24  # of the synthetic targets


@dataclass(frozen=True, slots=True)
class LiveConfig(TaskConfig):
    """The configuration of `python -m eval live`."""

    tokens: int = option(128, "Tokens per prompt, limited by the model's context; ends of text are ignored.")
    batch_sizes: tuple[int, ...] = option((1, 2, 4, 8, 16, 32), "Rows decoded together; one comparison for each.")
    exit_layers: tuple[int, ...] = option((), "Exit layers E of fixed settings; empty: every eighth up to half.")
    draft_lengths: tuple[int, ...] = option((1, 2, 3, 4, 6, 8), "Draft lengths D to try with every exit layer.")
    finalists: int = option(2, "How many fixed settings to time, the best in replay; the fastest is the best fixed.")
    policies: tuple[str, ...] = option((), "Policies to time in addition to plain, adaptive and fixed.")
    exact: bool = option(False, "Also time plain and adaptive in exact mode; predictions are for the usual mode.")
    repeats: int = option(7, "How often every method decodes all prompts.")
    warmup_tokens: int = option(16, "Tokens per prompt of the untimed call of every method at every batch size.")
    cost_repeats: int = option(15, "How often every piece of a round is timed, for the costs.")
    synthetic: bool = option(True, "Also time adaptive on synthetic targets whose acceptance falls from 1 to 0.05.")
    synthetic_batch_sizes: tuple[int, ...] = option((1, 8), "Batch sizes of the synthetic targets.")
    synthetic_hidden_size: int = option(
        256, "Hidden size of the synthetic targets; larger lowers the interpreter's share."
    )

    def __post_init__(self) -> None:
        check_tasks(self)
        check_least(self, 0, "threads", "num_questions")
        check_least(self, 1, "tokens", "finalists", "repeats", "warmup_tokens", "cost_repeats")
        size = self.synthetic_hidden_size
        check(size >= 16 and size % 16 == 0, "synthetic_hidden_size", "a multiple of 16", size)
        for name in ("batch_sizes", "draft_lengths", "synthetic_batch_sizes", "exit_layers"):
            given = getattr(self, name)
            fits = all(n >= 1 for n in given) and len(set(given)) == len(given)
            check(fits and bool(given or name == "exit_layers"), name, "different numbers of at least 1", list(given))
        for name in self.policies:
            parse_policy(name)

    def exits_of(self, num_layers: int) -> tuple[int, ...]:
        """The exit layers to try on a model of `num_layers`."""
        if not self.exit_layers:
            return tuple(sorted({max(1, num_layers * eighths // 8) for eighths in range(1, 5)}))
        fits = all(layer < num_layers for layer in self.exit_layers)
        check(fits, "exit_layers", f"in 1..{num_layers - 1} for this model", list(self.exit_layers))
        return self.exit_layers


def time_task(task: Task, config: LiveConfig, say: Say, folder: str | None = None) -> dict[str, Any]:
    """The record of one task, with a comparison per batch size.

    Args:
        folder: a folder to save the traces in; None: they are not saved.

    Raises:
        ValueError: the model or its questions cannot be opened, or the model lacks an exit layer.
    """
    llm, prompts = open_task(task, config, say)
    target = llm.target
    config.exits_of(target.split.num_layers)
    say(f"{task.name}: measuring costs")
    costs = measured_costs(llm, config.batch_sizes, config.cost_repeats)
    workload = workload_of(llm, prompts, config.tokens, costs, task.name, say)
    if folder:
        save_traces(workload.traces, folder, task.name, prior_of(target))
    lengths = [len(prompt) for prompt in prompts]
    return {
        "name": task.name,
        "model": measurement.model(llm, task.model) | measurement.device(target.split.device),
        "prompts": {"count": len(prompts), "shortest": min(lengths), "longest": max(lengths)},
        "num_tokens": sum(len(trace.tokens) for trace in workload.traces),
        "costs": costs.as_dict(),
        "batches": [time_batch(workload, size, config, task.name, say) for size in config.batch_sizes],
    }


def time_batch(workload: Workload, batch_size: int, config: LiveConfig, name: str, say: Say) -> dict[str, Any]:
    """Time plain, adaptive, the best fixed settings in replay and the other policies at one batch size."""
    say(f"{name}, batch size {batch_size}: choosing fixed settings by replay")
    workload = workload.filled(batch_size)
    others = [policy for policy in dict.fromkeys(config.policies) if policy not in (PLAIN, ADAPTIVE)]
    methods = [method_of(workload, policy) for policy in (PLAIN, ADAPTIVE)]
    exact = [m._replace(name=f"{m.name}, exact", kind=OTHER, exact=True) for m in methods if config.exact]
    methods += best_in_replay(workload, batch_size, config) + exact
    methods += [method_of(workload, policy) for policy in others]
    say(f"{name}, batch size {batch_size}: {', '.join(method.name for method in methods)}")
    records = compare(workload, methods, batch_size, config, say)
    own = next(record for record in records if record["kind"] == ADAPTIVE)
    best_fixed = max((r for r in records if r["kind"] == FIXED), key=lambda record: record["live"]["median"])
    by_repeat = zip(own["live_by_repeat"], best_fixed["live_by_repeat"], strict=True)
    return {
        "batch_size": batch_size,
        "num_prompts": len(workload.prompts),
        "adaptive": ADAPTIVE,
        "best_fixed": best_fixed["method"],
        "adaptive_over_best_fixed": spread(a / b for a, b in by_repeat)._asdict(),
        "methods": records,
    }


def time_synthetic(config: LiveConfig, say: Say) -> dict[str, Any]:
    """Time adaptive and plain decoding of synthetic targets by acceptance; `lowest` is adaptive's lowest speedup."""
    size, costs, levels = config.synthetic_hidden_size, None, []
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shape: dict[str, Any] = {"hidden_size": size, "intermediate_size": 5 * size // 2, "num_key_value_heads": 4}
    for wanted in ACCEPTANCES:
        target = synthetic_target("tiny", device=device, exit_layer=2, acceptance=wanted, **shape)
        if costs is None:
            say("synthetic: measuring costs")
            costs = measured_costs(target.llm, config.synthetic_batch_sizes, config.cost_repeats)
        prompts = random_prompts(target.split.vocab_size, PROMPTS, PROMPT_TOKENS)
        workload = workload_of(target.llm, prompts, config.tokens, costs, f"synthetic, acceptance {wanted:g}", say)
        hits = [bool(hit) for trace in workload.traces for hit in trace.hits[target.made.exit_layer - 1]]
        batches = []
        for rows in config.synthetic_batch_sizes:
            filled = workload.filled(rows)
            methods = [method_of(filled, policy) for policy in (PLAIN, ADAPTIVE)]
            batches.append({"batch_size": rows, "methods": compare(filled, methods, rows, config, say)})
        levels.append({**target.about(), "wanted": wanted, "acceptance": fmean(hits), "batches": batches})
    found = [
        {"acceptance": level["acceptance"], "batch_size": batch["batch_size"], **batch["methods"][1]}
        for level in levels
        for batch in level["batches"]
    ]
    return {"levels": levels, "lowest": min(found, key=lambda each: each["live"]["median"])}


class Timed(NamedTuple):
    """A method's calls, one per repeat, and the replay of each."""

    method: Method
    calls: Sequence[Call]
    replays: Sequence[Replayed]


def compare(
    workload: Workload, methods: Sequence[Method], batch_size: int, config: LiveConfig, say: Say
) -> list[dict[str, Any]]:
    """Time methods in turn and replay their calls; the first method is plain decoding. Returns a record per method."""
    calls = interleave(workload, methods, batch_size, config.repeats, config.warmup_tokens, say)
    timed = []
    for method in methods:
        live = calls[method.name]
        timed.append(Timed(method, live, [_replay(workload, method, one, batch_size) for one in live]))
    texts = [list(trace.tokens) for trace in workload.traces]
    return [_record(one, timed[0], texts) for one in timed]


def _replay(workload: Workload, method: Method, live: Call, batch_size: int) -> Replayed:
    """Replay a call with the policy's initial knowledge, at the costs measured before the call."""
    policy, costs = method.make(), live.costs or workload.costs
    if isinstance(policy, Adaptive) and live.correction is not None:
        policy.set_correction(live.correction)
    return replay(workload.traces, policy, costs, batch_size, overheads=live.overheads)


def method_of(workload: Workload, policy: str) -> Method:
    """A policy by name, with the acceptance statistics, or exit layer and draft length, stored with the model."""
    settings: tuple[int | None, int | None] = (None, None)
    if parse_policy(policy).kind not in CHOOSES_EXIT:
        settings = workload.llm.target.default_exit_layer, workload.llm.target.default_num_speculative_tokens
    kind = policy if policy in (PLAIN, ADAPTIVE) else OTHER
    prior = prior_of(workload.llm.target)
    return Method(policy, kind, lambda: make(policy, workload.costs, *settings, prior), {})


def fixed(costs: Costs, exit_layer: int, num_speculative_tokens: int) -> Method:
    """A fixed setting as a method."""
    settings = {"exit_layer": exit_layer, "num_speculative_tokens": num_speculative_tokens}
    name = f"fixed:{exit_layer},{num_speculative_tokens}"
    return Method(name, FIXED, lambda: make(name, costs), settings)


def best_in_replay(workload: Workload, batch_size: int, config: LiveConfig) -> list[Method]:
    """The `finalists` fixed settings that are fastest in replay, the fastest first."""
    exits = config.exits_of(workload.costs.num_layers)
    grid = [fixed(workload.costs, e, d) for e, d in product(exits, config.draft_lengths)]
    done = {one.name: replay(workload.traces, one.make(), workload.costs, batch_size) for one in grid}
    return sorted(grid, key=lambda one: done[one.name].round_seconds)[: config.finalists]


def _record(own: Timed, plain: Timed, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Live speedups over plain decoding in the same repeats, and the predicted ones."""
    method, calls, replays = own
    live = [b.decoding / a.decoding for a, b in zip(calls, plain.calls, strict=True)]
    seconds = spread(each.decoding for each in calls)
    predicted = [b.round_seconds / a.round_seconds for a, b in zip(replays, plain.replays, strict=True)]
    done = sorted(replays, key=lambda each: len(each.rounds))[len(replays) // 2]
    return {
        "method": method.name,
        "kind": method.kind,
        "settings": dict(method.settings),
        "predicted": spread(predicted).median,
        "live": spread(live)._asdict(),
        "live_by_repeat": live,
        "live_over_predicted": spread(a / b for a, b in zip(live, predicted, strict=True)).median,
        "whole_call": spread(b.wall / a.wall for a, b in zip(calls, plain.calls, strict=True))._asdict(),
        "seconds": seconds._asdict(),
        "predicted_seconds": spread(each.round_seconds for each in replays).median,
        "tokens_per_second": done.num_tokens / seconds.median,
        "predicted_rounds": len(done.rounds),
        "differing_prompts": sum(any(each.tokens[i] != tokens for each in calls) for i, tokens in enumerate(texts)),
        **_round_figures(calls),
    }


def _round_figures(calls: Sequence[Call]) -> dict[str, Any]:
    """Stages and plans of a method's rounds, over all its calls."""
    stages = {stage: sum(each.seconds[stage] for each in calls) for stage in STAGES}
    rounds, rows = sum(each.rounds for each in calls), sum(each.drafting_rows for each in calls)
    exits = sum((each.exits for each in calls), Counter[int | None]())
    drafting = Counter({layer: count for layer, count in exits.items() if layer is not None})
    stats = sum((each.stats for each in calls), SpecStats())
    return {
        "num_rounds": rounds / len(calls),
        "shares": {stage: seconds / sum(stages.values()) for stage, seconds in stages.items()},
        "control_microseconds_per_round": 1e6 * stages["control"] / rounds,
        "plain_rounds": exits[None] / len(calls),
        "mean_exit_layer": fmean(drafting.elements()) if drafting else None,
        "mean_drafted": stats.num_draft_tokens / rows if rows else 0.0,
        "acceptance_length": stats.mean_acceptance_length,
    }


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ValueError, OSError, UnsupportedModelError: an option, file or model cannot be used.
    """
    options = parser_of("live", LiveConfig, __doc__).parse_args(arguments)
    config = configured(LiveConfig, options)
    check(bool(config.tasks) or config.synthetic, "tasks", "at least one where synthetic is off", [])

    def measure(say: Say, folder: Path | None) -> dict[str, Any]:
        tasks = [time_task(task, config, say, options.record_traces) for task in config.tasks]
        synthetic = time_synthetic(config, say) if config.synthetic else None
        if folder is not None and tasks:
            plot_live(tasks, folder / "live.svg")
        return {"benchmark": "live", "tasks": tasks, "synthetic": synthetic}

    return run_command(options, config, measure, render)
