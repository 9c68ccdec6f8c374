"""Measure methods side by side on a question file, and write everything down in a folder that can be resumed.

The report goes to standard output, progress to standard error. Exit codes: 0; 1 (the disk was full: run the same
command again to go on); 2 (something asked for is not possible, in one sentence); 130 (Ctrl-C; the report of what was
answered so far is there, and the same command goes on).
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.run.config import RUN, RunConfig, known, load_run_config
from selfspec.errors import UnsupportedModelError


def parse_arguments(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "config", nargs="?", default=str(RUN), help="YAML file with the keys below; default: %(default)s"
    )
    kinds = typing.get_type_hints(RunConfig)
    for key in dataclasses.fields(RunConfig):
        kind, shape = kinds[key.name], dict[str, Any]()
        if typing.get_origin(kind) is tuple:
            shape = {"nargs": "*"}
        elif kind is bool:
            shape = {"action": argparse.BooleanOptionalAction}
        elif kind in (str, int, float):
            shape = {"type": kind}
        else:
            shape = {"nargs": "*", "metavar": "NAME=TEXT"}
        parser.add_argument(f"--{key.name.replace('_', '-')}", help=key.metadata["help"].replace("%", "%%"), **shape)
    return parser.parse_args(arguments)


def configuration(options: argparse.Namespace) -> RunConfig:
    """The configuration file's keys, replaced by those of the command line."""
    kinds, given = typing.get_type_hints(RunConfig), dict[str, Any]()
    for key, value in vars(options).items():
        if key != "config" and value is not None:
            is_list = isinstance(value, list)
            given[key] = (
                tuple(value) if typing.get_origin(kinds[key]) is tuple else _pairs(key, value) if is_list else value
            )
    return load_run_config(options.config, **given)


def _pairs(key: str, given: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for name, sign, text in pairs:
        if not (name and sign and text):
            raise ValueError(f"--{key} takes NAME=TEXT, got {name + sign + text!r}")
    return {name: text for name, _, text in pairs}


def main(arguments: Sequence[str] | None = None, prog: str = "python -m eval.run") -> int:
    """Run or resume; the exit code."""
    options = parse_arguments(arguments, prog)
    return _guarded(lambda: _run(configuration(options)))


def _guarded(command: Any) -> int:
    try:
        return int(command())
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, UnsupportedModelError) as problem:
        print(f"eval: {' '.join(str(problem).split())}", file=sys.stderr)
        return 1 if type(problem).__name__ == "FullError" else 2


def _run(config: RunConfig) -> int:
    from eval.run.session import Session  # heavy: torch and transformers

    session, code = Session(config), 0
    try:
        try:
            session.run()
        except KeyboardInterrupt:
            code = 130
        print(session.finish())
        print(f"{'stopped; go on with the same command: ' if code else ''}{config.output}", file=sys.stderr)
    finally:
        session.close()
    return code


def report(arguments: Sequence[str] | None = None, prog: str = "python -m eval report") -> int:
    """Write a run folder's summary and report anew, or show those of anybody's answer files; the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=report.__doc__)
    parser.add_argument("paths", nargs="+", help="a run folder, or answer files in Spec-Bench's format")
    parser.add_argument("--baseline", help="method (of files: a name without .jsonl) that speedups are over")
    options = parser.parse_args(arguments)
    return _guarded(lambda: _report([Path(path) for path in options.paths], options.baseline))


def _report(paths: Sequence[Path], baseline: str | None) -> int:
    from eval.run.lines import read_lines
    from eval.run.records import unique
    from eval.run.report import render
    from eval.run.summary import summarise

    is_run = len(paths) == 1 and (paths[0] / "summary.json").is_file()
    if not is_run:
        for path in paths:
            if not path.is_file():
                raise ValueError(f"{str(path)!r} is neither a finished run's folder nor an answer file")
        answers = {path.stem: unique(read_lines(path)) for path in paths}
        base = baseline or paths[0].stem
        known("baseline", base, answers)
        most = max(len(rows) for rows in answers.values())
        print(render(summarise(answers, [], base, num_questions=most)))
        return 0
    return _again(paths[0], baseline)


def _again(folder: Path, baseline: str | None) -> int:
    """A run folder's summary from its rows, with the comparison of outputs that the run itself has made."""
    from eval.run.lines import read_lines
    from eval.run.publish import write
    from eval.run.records import answers_path, unique
    from eval.run.summary import summarise

    before = json.loads((folder / "summary.json").read_text("utf-8"))
    names = [method["method"] for method in before["methods"]]
    if baseline:
        known("baseline", baseline, names)
    answers = {name: unique(read_lines(answers_path(folder, name))) for name in names}
    errors = list(unique(read_lines(folder / "errors.jsonl")).values())
    same = {key: before[key] for key in ("num_questions", "resamples", "seed")}
    found = summarise(answers, errors, baseline or before["baseline"], **same)
    kept = {key: before[key] for key in ("check", "metrics", "environment")}
    print(write(folder, {**found, **kept, "is_auto": before["is_auto"] and not baseline}))
    return 0


def compare(arguments: Sequence[str] | None = None, prog: str = "python -m eval compare") -> int:
    """What changed from one run to another, question by question; the exit code.

    Exit codes: 0; 1 (a figure named with --fail fell by more than its share, or rose where less is better, or a method
    has no answer to a question that it answered before; without --fail neither counts); 2 (something asked for is not
    possible, in one sentence).
    """
    text = inspect.cleandoc(compare.__doc__ or "").replace("; the exit code", "")
    parser = argparse.ArgumentParser(prog=prog, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="RUN_A", help="run folder of before")
    parser.add_argument("after", metavar="RUN_B", help="run folder of after")
    parser.add_argument(
        "--fail",
        nargs="+",
        action="extend",
        default=[],
        metavar="METRIC=SHARE",
        help="exit with 1 when METRIC of any method got worse by more than SHARE (0.05, or 5%%), or answers are lost; "
        "speedup=0.05 is the surest, as its baseline was timed beside it",
    )
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME", help="methods to compare; default: all")
    parser.add_argument("--category", default="overall", metavar="NAME", help="compare the questions of one category")
    parser.add_argument("--baseline", metavar="NAME", help="what speedups are over; default: each run's own baseline")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of Markdown")
    options = parser.parse_args(arguments)
    return _guarded(lambda: _compare(options))


def _compare(options: argparse.Namespace) -> int:
    from eval.run.compare import compare
    from eval.run.comparison import render
    from eval.run.resampling import open_run

    limits = dict(_limit(text) for text in options.fail)
    before, after = (open_run(Path(path), options.baseline) for path in (options.before, options.after))
    found = compare(before, after, limits, options.methods, options.category)
    print(json.dumps(found) if options.json else render(found))
    return int(found["has_failed"])


def _limit(text: str) -> tuple[str, float]:
    """A metric and the share of it that may be lost."""
    name, _, share = text.partition("=")
    try:
        number = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        number = -1.0
    if not name or not 0 <= number <= 1:
        raise ValueError(f"--fail takes METRIC=SHARE, the share in 0..1 such as 0.05 or 5%, got {text!r}")
    return name, number


if __name__ == "__main__":
    sys.exit(main())
