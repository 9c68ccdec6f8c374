"""Measure selfspec beside what it is to be compared with: `python -m eval bench [--quick]`.

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
from typing import Any

from eval.config import DEFAULT, QUICK, BenchConfig, load_config
from selfspec.errors import UnsupportedModelError


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser(
        "bench", help="plain and self-speculative decoding beside transformers' own, one process"
    )
    which = bench.add_mutually_exclusive_group()
    which.add_argument("--config", default=str(DEFAULT), help="YAML file with the keys below; default: %(default)s")
    which.add_argument("--quick", action="store_true", help=f"a look in about a minute: --config {QUICK.name}")
    bench.add_argument("-q", "--json-only", action="store_true", help="print the JSON document alone, and no progress")
    bench.add_argument("--output", help="a folder to write bench.json into as well")
    kinds = typing.get_type_hints(BenchConfig)
    for key in dataclasses.fields(BenchConfig):
        several = typing.get_origin(kinds[key.name]) is tuple
        shape: dict[str, Any] = {"type": int, "nargs": "*"} if several else {"type": kinds[key.name]}
        bench.add_argument(f"--{key.name.replace('_', '-')}", help=key.metadata["help"].replace("%", "%%"), **shape)
    return parser.parse_args(arguments)


def configuration(options: argparse.Namespace) -> BenchConfig:
    """The configuration file's keys, replaced by those of the command line."""
    given = {key.name: getattr(options, key.name) for key in dataclasses.fields(BenchConfig)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return load_config(QUICK if options.quick else options.config, **given)


def bench(options: argparse.Namespace) -> None:
    config = configuration(options)
    start = perf_counter()

    def say(text: str) -> None:
        if not options.json_only:
            print(f"[{perf_counter() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    say("loading")
    record = measure(config, say)
    record["seconds"] = round(perf_counter() - start, 1)
    document = json.dumps(rounded(record))
    if options.output:
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(document + "\n", "utf-8")
    if not options.json_only:
        from eval.table import render

        print(render(record), end="\n\n")
    print(document)


def rounded(value: Any) -> Any:
    """The same with six significant digits: no clock is better than that."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def measure(config: BenchConfig, say: Any) -> dict[str, Any]:
    """Load, run every stage, and gather one record of plain numbers."""
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
    record = bench.run(target, encode(questions, target.tokenizer), config, say)
    say("start-up in fresh processes")
    started = startup.in_fresh_processes(config, questions[0].turns[0])
    record["figures"] = figures.figures(record, started)
    del record["timings"]
    return {"benchmark": "side by side", **record, "load": started}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence when something asked for is not possible."""
    options = parse_arguments(arguments)
    try:
        bench(options)
    except (ValueError, OSError, UnsupportedModelError) as problem:
        print(f"eval: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
