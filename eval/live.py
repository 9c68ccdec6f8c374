"""Live speed of policies beside plain decoding and beside what replay predicts, by batch size, in one process.

All speedups are of decoding: live, what precedes the first round and the reading of prompts (and what a policy looks at
in it) is taken off every call, and replay has none. Replay prices the forwards of rounds by costs that were measured
beside every repeat, and counts what the interpreter took there in rounds that draft and in those that do not. The
speedup of whole calls, with everything in it, is reported beside them.
Stages and the reading of prompts are timed by the engine's own clock, which off the CPU measures launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from eval import environment
from eval.bench import check_room
from eval.config import LiveConfig, Task
from eval.live_timing import STAGES, Call, Scene, Way, interleave, scene_of
from eval.methods import Endless
from eval.questions import encode, read_questions
from eval.recording import prior_of
from eval.replay import Replayed, make, replay
from eval.summary import spread
from eval.timing import Say
from eval.traces import save
from selfspec.calibrate.measure import measure
from selfspec.control.adaptive import Adaptive
from selfspec.control.costs import Costs
from selfspec.control.registry import CHOOSES_EXIT
from selfspec.decoding.stats import SpecStats
from selfspec.legacy import opened as load_model

PLAIN, ADAPTIVE, FIXED, OTHER = "plain", "adaptive", "fixed", "other"


def time_task(task: Task, config: LiveConfig, say: Say, folder: str | None = None) -> dict[str, Any]:
    """One task's record, a part of it for every batch size.

    Args:
        folder: where to save the traces; None: nowhere.

    Raises:
        ValueError: the model or its questions cannot be opened, or the model lacks an exit layer asked for.
    """
    say(f"{task.name}: loading {task.model}")
    target = load_model(task.model, device=config.device or None, dtype=config.dtype)
    prompts = encode(read_questions(task.questions, config.num_questions), target.tokenizer)
    check_room(target, prompts, 1)
    config.exits_of(target.stack.num_layers)
    say(f"{task.name}: measuring costs")
    costs = measure(target.stack, config.batch_sizes, config.cost_repeats, within=None)
    scene = scene_of(Endless(target), prompts, config.tokens, costs, task.name, say)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        save(scene.traces, Path(folder) / f"{task.name}.npz", prior_of(target))
    lengths = [len(prompt) for prompt in prompts]
    return {
        "name": task.name,
        "model": environment.model(target, task.model) | environment.device(target.stack.device),
        "prompts": {"count": len(prompts), "shortest": min(lengths), "longest": max(lengths)},
        "num_tokens": sum(len(trace.tokens) for trace in scene.traces),
        "costs": costs.as_dict(),
        "batches": [time_batch(scene, size, config, task.name, say) for size in config.batch_sizes],
    }


def time_batch(scene: Scene, batch_size: int, config: LiveConfig, name: str, say: Say) -> dict[str, Any]:
    """Plain, adaptive, the fixed settings that do best in replay and all others asked for, at one batch size."""
    say(f"{name}, batch size {batch_size}: choosing fixed settings by replay")
    scene = scene.filled(batch_size)
    others = [policy for policy in dict.fromkeys(config.policies) if policy not in (PLAIN, ADAPTIVE)]
    best = best_in_replay(scene, batch_size, config)
    ways = [way_of(scene, policy) for policy in (PLAIN, ADAPTIVE)] + best + [way_of(scene, p) for p in others]
    say(f"{name}, batch size {batch_size}: {', '.join(way.name for way in ways)}")
    methods = compare(scene, ways, batch_size, config, say)
    own = next(method for method in methods if method["kind"] == ADAPTIVE)
    timed = [method for method in methods if method["kind"] == FIXED]
    best_fixed = max(timed, key=lambda method: method["live"]["median"])
    by_repeat = zip(own["live_by_repeat"], best_fixed["live_by_repeat"], strict=True)
    return {
        "batch_size": batch_size,
        "num_prompts": len(scene.prompts),
        "adaptive": ADAPTIVE,
        "best_fixed": best_fixed["method"],
        "adaptive_over_best_fixed": spread(a / b for a, b in by_repeat)._asdict(),
        "methods": methods,
    }


def compare(scene: Scene, ways: Sequence[Way], batch_size: int, config: LiveConfig, say: Say) -> list[dict[str, Any]]:
    """Records of some ways, the first of which is plain decoding, timed in turn and replayed."""
    calls = interleave(scene, ways, batch_size, config.repeats, config.warmup_tokens, say)
    say("replaying")
    replayed = {way.name: [_replay(scene, way, one, batch_size) for one in calls[way.name]] for way in ways}
    first = ways[0].name
    return [_record(way, calls[way.name], calls[first], replayed[way.name], replayed[first], scene) for way in ways]


def _replay(scene: Scene, way: Way, live: Call, batch_size: int) -> Replayed:
    """By a policy that knows what the live one did when it began, in the time that rounds take by the costs measured
    beside that call, and with what the interpreter took in its rounds."""
    policy, costs = way.make(), live.costs or scene.costs
    if isinstance(policy, Adaptive) and live.correction is not None:
        policy.set_correction(live.correction)
    return replay(scene.traces, policy, costs, batch_size, beside=live.beside)


def way_of(scene: Scene, policy: str) -> Way:
    """A policy by name, which starts from what is stored with the model: its statistics, or exit and draft length."""
    told: tuple[int | None, int | None] = (None, None)
    if policy not in CHOOSES_EXIT:
        told = scene.target.default_exit_layer, scene.target.default_num_draft_tokens
    kind = policy if policy in (PLAIN, ADAPTIVE) else OTHER
    prior = prior_of(scene.target)
    return Way(policy, kind, lambda: make(policy, scene.costs, *told, prior), {})


def fixed(costs: Costs, exit_layer: int, num_draft_tokens: int) -> Way:
    settings = {"exit_layer": exit_layer, "num_draft_tokens": num_draft_tokens}
    name = f"fixed (E={exit_layer}, D={num_draft_tokens})"
    return Way(name, FIXED, lambda: make("fixed", costs, exit_layer, num_draft_tokens), settings)


def best_in_replay(scene: Scene, batch_size: int, config: LiveConfig) -> list[Way]:
    """The fixed settings of the grid that replay finds fastest, the fastest first."""
    exits = config.exits_of(scene.costs.num_layers)
    grid = [fixed(scene.costs, e, d) for e, d in product(exits, config.draft_lengths)]
    seconds = {way.name: _rounds(replay(scene.traces, way.make(), scene.costs, batch_size)) for way in grid}
    return sorted(grid, key=lambda way: seconds[way.name])[: config.finalists]


def _rounds(done: Replayed) -> float:
    """Seconds of a replay's rounds: without looks at prompts, as the live ones."""
    return sum(round_.seconds for round_ in done.rounds)


def _record(
    way: Way,
    calls: Sequence[Call],
    plain: Sequence[Call],
    replays: Sequence[Replayed],
    plain_replays: Sequence[Replayed],
    scene: Scene,
) -> dict[str, Any]:
    """What a way came to live, beside plain decoding in the same repeats, and in replay beside plain decoding there."""
    live = [b.decoding / a.decoding for a, b in zip(calls, plain, strict=True)]
    seconds = spread(each.decoding for each in calls)
    predicted = [_rounds(b) / _rounds(a) for a, b in zip(replays, plain_replays, strict=True)]
    done = sorted(replays, key=lambda each: len(each.rounds))[len(replays) // 2]
    wanted = [list(trace.tokens) for trace in scene.traces]
    return {
        "method": way.name,
        "kind": way.kind,
        "settings": dict(way.settings),
        "predicted": spread(predicted).median,
        "live": spread(live)._asdict(),
        "live_by_repeat": live,
        "live_over_predicted": spread(a / b for a, b in zip(live, predicted, strict=True)).median,
        "whole_call": spread(b.wall / a.wall for a, b in zip(calls, plain, strict=True))._asdict(),
        "seconds": seconds._asdict(),
        "predicted_seconds": spread(map(_rounds, replays)).median,
        "tokens_per_second": done.num_tokens / seconds.median,
        "predicted_rounds": len(done.rounds),
        "predicted_rounds_by_exit_layer": _by_exit(Counter(round_.plan.exit_layer for round_ in done.rounds)),
        "differing_prompts": sum(any(each.tokens[i] != tokens for each in calls) for i, tokens in enumerate(wanted)),
        **_inside(calls),
    }


def _inside(calls: Sequence[Call]) -> dict[str, Any]:
    """Where the time of a way's rounds went, and what it planned, over all its calls together."""
    stages = {stage: sum(each.seconds[stage] for each in calls) for stage in STAGES}
    rounds, rows = sum(each.rounds for each in calls), sum(each.rows for each in calls)
    exits = sum((each.exits for each in calls), Counter[int | None]())
    drafting = Counter({layer: count for layer, count in exits.items() if layer is not None})
    stats = sum((each.stats for each in calls), SpecStats())
    return {
        "num_rounds": rounds / len(calls),
        "shares": {stage: seconds / sum(stages.values()) for stage, seconds in stages.items()},
        "control_microseconds_per_round": 1e6 * stages["control"] / rounds,
        "rounds_by_exit_layer": _by_exit(exits, len(calls)),
        "plain_rounds": exits[None] / len(calls),
        "mean_exit_layer": fmean(drafting.elements()) if drafting else None,
        "mean_drafted": stats.num_draft_tokens / rows if rows else 0.0,
        "acceptance_length": stats.mean_acceptance_length,
    }


def _by_exit(exits: Counter[int | None], over: int = 1) -> dict[str, float]:
    """Rounds by planned exit layer, plain ones left out, as names of a JSON document."""
    return {str(layer): exits[layer] / over for layer in sorted(layer for layer in exits if layer is not None)}
