"""The record of a live comparison as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from eval.live_timing import STAGES
from eval.table import table

COLUMNS = ("predicted", "live (95 % sure from 6 repeats)", "live/predicted", "whole call")


def render(record: dict[str, Any]) -> str:
    """Per task: speedups by batch size, and where adaptive's time went; then the synthetic targets."""
    return "\n\n".join(_parts(record))


def _parts(record: dict[str, Any]) -> Iterator[str]:
    env, config = record["environment"], record["config"]
    yield (
        f"{env['cpu']}, {env['threads']} threads on {env['cpu_cores']} cores, load average {env['load_average']} to "
        f"{env['load_average_at_end']}; {config['repeats']} interleaved repeats, greedy; speedups over plain decoding, "
        "without the reading of prompts and what precedes it, but for 'whole call'"
    )
    for task in record["tasks"]:
        model, prompts, name = task["model"], task["prompts"], task["name"]
        yield (
            f"{name}: {model['model']}, {model['num_layers']} layers, {model['dtype']}, {model['device']}; "
            f"{prompts['count']} prompts of {prompts['shortest']} to {prompts['longest']} tokens, "
            f"{task['num_tokens']} new tokens"
        )
        for which in ("adaptive", "best_fixed"):
            yield f"{name}: {which.replace('_', ' ')}\n\n{_speeds(task['batches'], which)}"
        if config["policies"]:
            yield f"{name}: all methods, live (predicted)\n\n{_everything(task['batches'])}"
        yield f"{name}: adaptive's rounds\n\n{_inside(task['batches'])}"
    if record["synthetic"]:
        yield from _synthetic(record["synthetic"])


def _speeds(batches: Sequence[dict[str, Any]], which: str) -> str:
    names = ["settings"] if which == "best_fixed" else []
    beside = [] if names else ["over best fixed"]
    body = []
    for batch in batches:
        own, plain = _method(batch, batch[which]), _method(batch, "plain")
        settings = [f"E={own['settings']['exit_layer']}, D={own['settings']['num_draft_tokens']}"] if names else []
        speeds = [f"{each['tokens_per_second']:.1f}" for each in (plain, own)]
        differ = "/".join(str(each["differing_prompts"]) for each in (plain, own))
        rows = [str(batch["batch_size"]), str(batch["num_prompts"])]
        over = [_surely(batch["adaptive_over_best_fixed"]) for _ in beside]
        body.append([*rows, *settings, *speeds, *_speedup(own), *over, differ])
    columns = ["rows", "prompts", *names, "plain tokens/s", "tokens/s", *COLUMNS, *beside, "differing (plain/own)"]
    return table(columns, body)


def _surely(ratio: dict[str, Any]) -> str:
    return f"{ratio['median']:.3f} ({ratio['sure_low']:.3f}..{ratio['sure_high']:.3f})"


def _speedup(method: dict[str, Any]) -> list[str]:
    return [
        f"{method['predicted']:.3f}",
        _surely(method["live"]),
        f"{method['live_over_predicted']:.3f}",
        f"{method['whole_call']['median']:.3f}",
    ]


def _everything(batches: Sequence[dict[str, Any]]) -> str:
    """A column per policy; of the fixed settings the best."""
    names = [m["method"] for m in batches[0]["methods"] if m["kind"] != "fixed"]
    body = []
    for batch in batches:
        shown = [_method(batch, name) for name in (*names, batch["best_fixed"])]
        cells = [f"{each['live']['median']:.3f} ({each['predicted']:.3f})" for each in shown]
        body.append([str(batch["batch_size"]), *cells])
    return table(["rows", *names, "best fixed"], body)


def _inside(batches: Sequence[dict[str, Any]]) -> str:
    columns = [
        "rows",
        *STAGES,
        "control µs/round",
        "rounds (plain)",
        "mean exit",
        "drafted",
        "acceptance",
        "exits",
    ]
    body = []
    for batch in batches:
        own = _method(batch, batch["adaptive"])
        exit_layer, by_exit = own["mean_exit_layer"], own["rounds_by_exit_layer"]
        body.append(
            [
                str(batch["batch_size"]),
                *(f"{own['shares'][stage]:.1%}" for stage in STAGES),
                f"{own['control_microseconds_per_round']:.0f}",
                f"{own['num_rounds']:.0f} ({own['plain_rounds']:.0f})",
                "" if exit_layer is None else f"{exit_layer:.2f}",
                f"{own['mean_drafted']:.2f}",
                f"{own['acceptance_length']:.2f}",
                " ".join(f"{layer}:{count:.0f}" for layer, count in by_exit.items()),
            ]
        )
    return table(columns, body)


def _synthetic(record: dict[str, Any]) -> Iterator[str]:
    where = f"acceptance at layer {record['exit_layer']} of {record['num_layers']}"
    body = []
    for level in record["levels"]:
        for batch in level["batches"]:
            own = _method(batch, "adaptive")
            share = own["plain_rounds"] / own["num_rounds"]
            rows = [f"{level['scale']:g}", f"{level['acceptance']:.3f}", str(batch["batch_size"])]
            body.append([*rows, *_speedup(own), f"{share:.0%}", str(own["differing_prompts"])])
    columns = ["scale", where, "rows", *COLUMNS, "plain rounds", "differing"]
    yield f"Synthetic targets: adaptive's speedup as acceptance is forced from 1 to nearly 0\n\n{table(columns, body)}"
    low = record["lowest"]
    yield (
        f"Lowest: {_surely(low['live'])} at acceptance {low['acceptance']:.3f}, "
        f"{low['batch_size']} rows; whole call there {low['whole_call']['median']:.3f}"
    )


def _method(batch: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(method for method in batch["methods"] if method["method"] == name)
    return found
