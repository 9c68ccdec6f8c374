"""Measure selfspec: on a question file beside any other decoder (`run`, `report`, and `compare` for two runs), beside
transformers' own in short (`bench`), and its policies beside each other, by replay (`replay`) and decoding (`live`).

Tables for people go to standard output, with one JSON document as the last line; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from types import UnionType
from typing import Any

from eval.config import (
    DEFAULT,
    LIVE,
    QUICK,
    REPLAY,
    BenchConfig,
    LiveConfig,
    ReplayConfig,
    Task,
    load_config,
    load_live_config,
    load_replay_config,
)
from eval.digits import rounded
from selfspec.errors import UnsupportedModelError


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="methods side by side on a question file, in Spec-Bench's records", add_help=False)
    commands.add_parser("report", help="a run folder's report anew, or one of Spec-Bench answer files", add_help=False)
    commands.add_parser("cpu", help="what rounds cost on this CPU, beside llama.cpp too", add_help=False)
    commands.add_parser("compare", help="what changed from one run folder to another", add_help=False)
    commands.add_parser("gpu", help="a GPU's kernels, bandwidth and tokens per second, in ten minutes", add_help=False)
    commands.add_parser("exact", help="what exact mode costs, on a synthetic target", add_help=False)
    commands.add_parser("kernels", help="registers of every GPU kernel, compiled here for a device", add_help=False)
    bench = commands.add_parser(
        "bench", help="plain and self-speculative decoding beside transformers' own, one process"
    )
    which = bench.add_mutually_exclusive_group()
    which.add_argument("--config", default=str(DEFAULT), help="YAML file with the keys below; default: %(default)s")
    which.add_argument("--quick", action="store_true", help=f"a look in about a minute: --config {QUICK.name}")
    _add_shared(bench, "a folder to write bench.json into as well")
    _add_keys(bench, BenchConfig)
    replay = commands.add_parser("replay", help="every policy on recorded outputs, without the model, beside bounds")
    replay.add_argument("--config", default=str(REPLAY), help="YAML file with the keys below; default: %(default)s")
    replay.add_argument("--traces", nargs="+", default=[], metavar="FILE", help="traces to replay; nothing is decoded")
    replay.add_argument("--costs", metavar="FILE", help="JSON file of costs, instead of measuring them here")
    _add_task(replay)
    _add_shared(replay, "a folder to write replay.json, costs.json and plots into as well")
    _add_keys(replay, ReplayConfig, without=("tasks",))
    live = commands.add_parser("live", help="adaptive, fixed settings and plain decoding by batch size, beside replay")
    live.add_argument("--config", default=str(LIVE), help="YAML file with the keys below; default: %(default)s")
    _add_task(live)
    _add_shared(live, "a folder to write live.json and live.svg into as well")
    _add_keys(live, LiveConfig, without=("tasks",))
    return parser.parse_args(arguments)


def _add_task(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--task",
        nargs=3,
        action="append",
        default=[],
        metavar=("NAME", "MODEL", "QUESTIONS"),
        help="a task beside those of the configuration; its question file is relative to where you are",
    )


def _add_shared(command: argparse.ArgumentParser, output: str) -> None:
    command.add_argument("-q", "--json-only", action="store_true", help="print the JSON document alone, no progress")
    command.add_argument("--output", metavar="FOLDER", help=output)
    command.add_argument("--record-traces", metavar="FOLDER", help="a folder to save traces of plain outputs into")


def _add_keys(command: argparse.ArgumentParser, config: type, without: Sequence[str] = ()) -> None:
    """An option for every key of a configuration."""
    kinds = typing.get_type_hints(config)
    for key in dataclasses.fields(config):
        if key.name in without:
            continue
        kind, shape = kinds[key.name], dict[str, Any]()
        if typing.get_origin(kind) is tuple:
            kind, shape = typing.get_args(kind)[0], {"nargs": "*"}
        if kind is bool:
            shape["action"] = argparse.BooleanOptionalAction
        else:
            shape["type"] = _number_or_word if isinstance(kind, UnionType) else kind
        command.add_argument(f"--{key.name.replace('_', '-')}", help=key.metadata["help"].replace("%", "%%"), **shape)


def _number_or_word(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def configuration(options: argparse.Namespace) -> BenchConfig | ReplayConfig | LiveConfig:
    """The configuration file's keys, replaced by those of the command line."""
    kind: type = {"bench": BenchConfig, "replay": ReplayConfig, "live": LiveConfig}[options.command]
    keys = {key.name for key in dataclasses.fields(kind)}
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in vars(options).items() if key in keys}
    if kind is BenchConfig:
        return load_config(QUICK if options.quick else options.config, **given)
    read = load_replay_config if kind is ReplayConfig else load_live_config
    return read(options.config, tuple(Task(*task) for task in options.task), **given)


def run(options: argparse.Namespace) -> None:
    """Run one command and write down what it found."""
    config = configuration(options)
    start = perf_counter()

    def say(text: str) -> None:
        if not options.json_only:
            print(f"[{perf_counter() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    if isinstance(config, BenchConfig):
        record = bench(config, options, say)
        from eval.table import render
    elif isinstance(config, ReplayConfig):
        record = replay(config, options, say)
        from eval.replay_table import render
    else:
        record = live(config, options, say)
        from eval.live_table import render
    record["seconds"] = round(perf_counter() - start, 1)
    document = json.dumps(rounded(record))
    if options.output:
        (folder_of(options) / f"{options.command}.json").write_text(document + "\n", "utf-8")
    if not options.json_only:
        print(render(record), end="\n\n")
    print(document)


def folder_of(options: argparse.Namespace) -> Path:
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def bench(config: BenchConfig, options: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Load, run every stage, and gather one record of plain numbers."""
    say("loading")
    import torch  # heavy, like all that follows
    from transformers.utils import logging

    from eval import bench, figures, startup
    from eval.questions import encode, read_questions
    from selfspec import load

    logging.set_verbosity_error()  # it remarks upon its own early exit's calls
    questions = read_questions(config.questions, config.num_questions)
    if config.threads:
        torch.set_num_threads(config.threads)
    target = load(config.model, device=config.device or None, dtype=config.dtype)
    record = bench.run(target, encode(questions, target.tokenizer), config, say, options.record_traces)
    say("start-up in fresh processes")
    started = startup.in_fresh_processes(config, questions[0].turns[0])
    record["figures"] = figures.figures(record, started)
    del record["timings"]
    return {"benchmark": "side by side", **record, "load": started}


def replay(config: ReplayConfig, options: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Gather the tasks, replay every policy, and draw what is to be drawn."""
    import torch  # heavy, like all that follows

    from eval import environment, knee, plots
    from eval.compare import compare
    from eval.tasks import gather

    if options.output:
        plots.check_plots()
    if config.threads:
        torch.set_num_threads(config.threads)
    about = environment.machine()
    tasks = gather(config, options.traces, options.costs, options.record_traces, say)
    sections = compare(tasks, config, say)
    if options.output:
        folder = folder_of(options)
        costs = {task.name: task.costs.as_dict() for task in tasks}
        (folder / "costs.json").write_text(json.dumps(costs) + "\n", "utf-8")
        say("plots")
        plots.plot_policies(max(sections, key=lambda s: s["length"]), folder / "policies.svg")
        shown = knee.shown_policies()
        if shown:
            plots.plot_knee(knee.sweep(shown, knee.knee_costs()), folder / "knee.svg")
    return {
        "benchmark": "replay",
        "environment": about,
        "config": dataclasses.asdict(config),
        "tasks": [task.as_dict() for task in tasks],
        "sections": sections,
    }


def live(config: LiveConfig, options: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Time every task at every batch size, then the synthetic targets, and draw the speedups."""
    import torch  # heavy, like all that follows

    from eval import environment, plots, synthetic
    from eval.live import time_task

    if options.output:
        plots.check_plots()
    if config.threads:
        torch.set_num_threads(config.threads)
    about = environment.machine()
    tasks = [time_task(task, config, say, options.record_traces) for task in config.tasks]
    forced = synthetic.sweep(config, say) if config.synthetic else None
    about["load_average_at_end"] = environment.load_average()
    if options.output and tasks:
        plots.plot_live(tasks, folder_of(options) / "live.svg")
    settings = dataclasses.asdict(config)
    return {"benchmark": "live", "environment": about, "config": settings, "tasks": tasks, "synthetic": forced}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence when something asked for is not possible; `run` and `compare` have more."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["cpu"]:
        from eval.cpu import __main__ as cpu

        return cpu.main(given[1:])
    if given[:1] in (["run"], ["report"], ["compare"]):
        from eval.run import __main__ as runs

        if given[0] == "run":
            return runs.main(given[1:], "python -m eval run")
        return (runs.report if given[0] == "report" else runs.compare)(given[1:])
    if given[:1] == ["exact"]:
        from eval import exact

        return exact.main(given[1:])
    if given[:1] == ["gpu"]:
        from eval.gpu import bench as gpu

        return gpu.main(given[1:])
    if given[:1] == ["kernels"]:
        from eval.gpu import command

        return command.main(given[1:])
    options = parse_arguments(given)
    try:
        run(options)
    except (ValueError, OSError, UnsupportedModelError) as problem:
        print(f"eval: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
