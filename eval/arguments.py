"""The command line of `python -m eval`: an option for every key of a command's configuration, and a few more."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence
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


def parse_arguments(arguments: Sequence[str], description: str | None = None) -> argparse.Namespace:
    """The options of `bench`, `replay` or `live`; other commands are only named, for the help."""
    parser = argparse.ArgumentParser(prog="python -m eval", description=description)
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
