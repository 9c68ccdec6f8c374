"""What the commands over tasks share: their flags, progress, one JSON document, and files in a folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch

from eval import environment
from eval.config import FOLDER, add_flags, flags_given, read_config
from eval.plots import check_plots
from eval.tasks import Task, TaskConfig
from eval.timing import Say

Config = TypeVar("Config", bound=TaskConfig)
Record = dict[str, Any]


def parser_of(name: str, kind: type[TaskConfig], description: str) -> argparse.ArgumentParser:
    """The command line of `python -m eval NAME`: a flag for every key of its configuration, and those for files."""
    parser = argparse.ArgumentParser(prog=f"python -m eval {name}", description=description)
    file = str(FOLDER / f"{name}.yaml")
    parser.add_argument("--config", default=file, help="YAML file with keys of the same names as the flags below")
    parser.add_argument(
        "--task",
        nargs=3,
        action="append",
        default=[],
        metavar=("NAME", "MODEL", "QUESTIONS"),
        help="a task beside those of the configuration, or in place of the one of the same name",
    )
    parser.add_argument("--output", metavar="FOLDER", help=f"a folder to write {name}.json and plots into as well")
    parser.add_argument("--record-traces", metavar="FOLDER", help="a folder to save traces of plain outputs into")
    parser.add_argument("-q", "--json-only", action="store_true", help="print the JSON document alone, no progress")
    add_flags(parser, kind)
    return parser


def configured(kind: type[Config], options: argparse.Namespace) -> Config:
    """The configuration file's values, replaced by those of the command line, whose tasks join the file's.

    Raises:
        ValueError: see `read_config`.
    """
    config = read_config(kind, options.config, flags_given(options, kind))
    given = [Task(*each) for each in options.task]
    names = {task.name for task in given}
    return dataclasses.replace(config, tasks=[*(task for task in config.tasks if task.name not in names), *given])


def run(
    options: argparse.Namespace,
    config: TaskConfig,
    measure: Callable[[Say, Path | None], Record],
    render: Callable[[Record], str],
) -> int:
    """Measure, write the record and print it: tables for people, then one JSON document as the last line.

    Args:
        measure: makes the record; handed the progress printer and the output folder, if there is one.
        render: the record's tables.
    """
    start = perf_counter()

    def say(text: str) -> None:
        if not options.json_only:
            print(f"[{perf_counter() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    folder = Path(options.output) if options.output else None
    if folder is not None:
        check_plots()
        folder.mkdir(parents=True, exist_ok=True)
    if config.threads:
        torch.set_num_threads(config.threads)
    about = environment.machine()
    found = measure(say, folder)
    about["load_average_at_end"] = environment.load_average()
    record = {"environment": about, "config": dataclasses.asdict(config), **found}
    record["seconds"] = round(perf_counter() - start, 1)
    document = json.dumps(rounded(record))
    if folder is not None:
        (folder / f"{record['benchmark']}.json").write_text(document + "\n", "utf-8")
    if not options.json_only:
        print(render(record), end="\n\n")
    print(document)
    return 0


def rounded(value: Any) -> Any:
    """Plain values with six significant digits: no clock is better than that."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
