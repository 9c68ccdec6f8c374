"""The record of a live comparison as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from eval.figures import table
from eval.live_timing import STAGES

SPEEDUPS = ("live (95 % from 6 repeats)", "predicted", "live/predicted", "whole call")


def render(record: dict[str, Any]) -> str:
    """Tables per task: speedups by batch size, and adaptive's rounds; then the synthetic targets."""
    return "\n\n".join(_parts(record))


def _parts(record: dict[str, Any]) -> Iterator[str]:
    env, config = record["environment"], record["config"]
    yield (
        f"{env['cpu']}, {env['threads']} threads on {env['cpu_cores']} cores, load average {env['load_average']} to "
        f"{env['load_average_at_end']}; {config['repeats']} interleaved repeats, greedy; speedups over plain decoding, "
        "without prefill and the time before it; 'whole call' includes both"
    )
    for task in record["tasks"]:
        model, prompts, name = task["model"], task["prompts"], task["name"]
        yield (
            f"{name}: {model['model']}, {model['num_layers']} layers, {model['dtype']}, {model['device']}; "
            f"{prompts['count']} prompts of {prompts['shortest']} to {prompts['longest']} tokens, "
            f"{task['num_tokens']} new tokens"
        )
        yield f"{name}: adaptive\n\n{_adaptive(task['batches'])}"
        yield f"{name}: every method, live (predicted)\n\n{_every(task['batches'])}"
        yield f"{name}: adaptive's rounds\n\n{_rounds(task['batches'])}"
    if record["synthetic"]:
        yield from _synthetic(record["synthetic"])


def _adaptive(batches: Sequence[dict[str, Any]]) -> str:
    body = []
    for batch in batches:
        own, plain = _method(batch, batch["adaptive"]), _method(batch, "plain")
        speeds = [f"{each['tokens_per_second']:.1f}" for each in (plain, own)]
        over = [_interval(batch["adaptive_over_best_fixed"]), batch["best_fixed"]]
        body.append([str(batch["batch_size"]), str(batch["num_prompts"]), *speeds, *_speedup(own), *over])
    columns = ["rows", "prompts", "plain tokens/s", "adaptive tokens/s", *SPEEDUPS, "over best fixed", "best fixed"]
    return table(columns, body)


def _interval(ratio: dict[str, Any]) -> str:
    return f"{ratio['median']:.3f} ({ratio['ci_low']:.3f}..{ratio['ci_high']:.3f})"


def _speedup(method: dict[str, Any]) -> list[str]:
    figures = method["predicted"], method["live_over_predicted"], method["whole_call"]["median"]
    return [_interval(method["live"]), *(f"{figure:.3f}" for figure in figures)]


def _every(batches: Sequence[dict[str, Any]]) -> str:
    """A column per method (of fixed settings, the best), and the number of prompts whose tokens differ from plain."""
    names = [m["method"] for m in batches[0]["methods"] if m["kind"] != "fixed"]
    body = []
    for batch in batches:
        shown = [_method(batch, name) for name in (*names, batch["best_fixed"])]
        cells = [f"{each['live']['median']:.3f} ({each['predicted']:.3f})" for each in shown]
        differing = sum(method["differing_prompts"] for method in batch["methods"])
        body.append([str(batch["batch_size"]), *cells, str(differing)])
    return table(["rows", *names, "best fixed", "differing prompts"], body)


def _rounds(batches: Sequence[dict[str, Any]]) -> str:
    columns = ["rows", *STAGES, "control µs/round", "rounds (plain)", "mean exit", "drafted", "acceptance"]
    body = []
    for batch in batches:
        own = _method(batch, batch["adaptive"])
        body.append(
            [
                str(batch["batch_size"]),
                *(f"{own['shares'][stage]:.1%}" for stage in STAGES),
                f"{own['control_microseconds_per_round']:.0f}",
                f"{own['num_rounds']:.0f} ({own['plain_rounds']:.0f})",
                "" if own["mean_exit_layer"] is None else f"{own['mean_exit_layer']:.2f}",
                f"{own['mean_drafted']:.2f}",
                f"{own['acceptance_length']:.2f}",
            ]
        )
    return table(columns, body)


def _synthetic(record: dict[str, Any]) -> Iterator[str]:
    first = record["levels"][0]
    body = []
    for level in record["levels"]:
        for batch in level["batches"]:
            own = _method(batch, "adaptive")
            share = own["plain_rounds"] / own["num_rounds"]
            rows = [f"{level['acceptance']:.3f}", str(batch["batch_size"])]
            body.append([*rows, *_speedup(own), f"{share:.0%}", str(own["differing_prompts"])])
    where = f"acceptance at layer {first['exit_layer']} of {first['num_layers']}"
    rows_of = table([where, "rows", *SPEEDUPS, "plain rounds", "differing prompts"], body)
    yield f"Synthetic targets: adaptive's speedup as acceptance falls from 1 to 0.05\n\n{rows_of}"
    low = record["lowest"]
    yield (
        f"Lowest: {_interval(low['live'])} at acceptance {low['acceptance']:.3f}, "
        f"{low['batch_size']} rows; whole call there {low['whole_call']['median']:.3f}"
    )


def _method(batch: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(method for method in batch["methods"] if method["method"] == name)
    return found
