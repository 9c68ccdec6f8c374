"""Measure selfspec: on a question file beside any other decoder (`run`, `report`, and `compare` for two runs), beside
transformers' own in short (`bench`), and its policies beside each other, by replay (`replay`) and decoding (`live`).

Tables for people go to standard output, with one JSON document as the last line; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from eval.arguments import configuration, parse_arguments
from eval.config import BenchConfig, LiveConfig, ReplayConfig
from eval.digits import rounded
from selfspec.errors import UnsupportedModelError


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
    from selfspec.legacy import opened as load

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
    from eval.traces import renumbered

    if options.output:
        plots.check_plots()
    if config.threads:
        torch.set_num_threads(config.threads)
    about = environment.machine()
    tasks = gather(config, options.traces, options.costs, options.record_traces, say)
    if config.renumbered != "no":
        seed = config.seed if config.renumbered == "random" else None
        tasks = [task._replace(traces=renumbered(task.traces, seed)) for task in tasks]
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
    options = parse_arguments(given, __doc__)
    try:
        run(options)
    except (ValueError, OSError, UnsupportedModelError) as problem:
        print(f"eval: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
