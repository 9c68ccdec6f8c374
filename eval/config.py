"""The configuration of `python -m eval run`, and the options that all commands share; see `train.configuration`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, cast

from eval.methods import PLAIN_KINDS, parse_method
from eval.metrics import METRICS
from eval.questions import COLUMNS, NAMED_SETS, is_file
from train.configuration import (
    add_flags,
    as_plain,
    check,
    check_known,
    check_least,
    option,
    read_config,
)

FOLDER = Path(__file__).parents[1] / "configs" / "eval"
AUTO = "auto"
NOT_RECORDED = ("output", "baseline", "metrics")  # these may change when a run is resumed
Config = TypeVar("Config")


def parser_of(command: str, kind: type, description: str | None) -> argparse.ArgumentParser:
    """The command line of `python -m eval COMMAND`: a configuration file, and a flag for every key of it."""
    raw = argparse.RawDescriptionHelpFormatter
    usage = f"python -m eval {command} [CONFIG] [--key VALUE ...]"
    parser = argparse.ArgumentParser(command, usage, description, formatter_class=raw, allow_abbrev=False)
    text = "YAML file with the keys below; default: %(default)s"
    parser.add_argument("config", nargs="?", default=str(FOLDER / f"{command}.yaml"), help=text)
    add_flags(parser, kind)
    return parser


def config_of(kind: type[Config], path: str | Path, given: Mapping[str, Any] | None = None) -> Config:
    """Read a command's configuration; where it names no output folder, that is in runs/.

    Args:
        given: values of flags, by key.

    Raises:
        ValueError: see `train.configuration.read_config`.
    """
    config: Any = read_config(kind, path, given)
    if getattr(config, "output", None) == "":
        return cast("Config", dataclasses.replace(config, output=str(Path("runs") / Path(path).stem)))
    return cast("Config", config)


@dataclass(frozen=True, slots=True)
class Common:
    """The options of every command that opens a model."""

    device: str = option("", "Device of the model; empty: a GPU where there is one, else the CPU.")
    dtype: str = option("float32", "Number format of the weights; equality with plain decoding is promised in float32.")
    threads: int = option(0, "CPU threads of torch; 0 keeps torch's own default.")
    num_questions: int = option(0, "How many questions to use, from the first on; 0 uses all.")


@dataclass(frozen=True, slots=True)
class RunConfig(Common):
    """The configuration of `python -m eval run`."""

    model: str = option(
        "demo", "Model to open: 'demo' (the embedded model), 'smollm2', a folder, a GGUF file, a hub id."
    )
    questions: str = option(
        "prompts.jsonl",
        f"Question file (JSON lines), or the name of a set: {', '.join(NAMED_SETS)}.",
        is_file=is_file,
    )
    questions_path: str = option("", "File of a named set; named sets are not part of the repository.", is_file=is_file)
    columns: dict[str, str] = option({}, f"The file's names of {', '.join(COLUMNS)}, where they differ.")
    per_category: int = option(0, "How many questions of each category to use, the first ones; 0 uses all.")
    max_new_tokens: int = option(128, "Maximum tokens per turn; fewer where the context is too short.")
    reuse_responses: bool = option(
        False, "selfspec's methods draft from their answers to earlier questions, too; else no answer helps another."
    )
    ignore_eos: bool = option(False, "Always write max_new_tokens; else stop at the model's end of text.")
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.")
    seed: int = option(0, "Seed of the first question's sampled output (the next has the next) and of the intervals.")
    methods: tuple[str, ...] = option(("transformers", "plain", "adaptive"), "Methods to compare.")
    baseline: str = option(AUTO, "Method that speedups are over; 'auto': the fastest plain decoding in the run.")
    metrics: tuple[str, ...] = option((), "Columns of the report's first table; none given: the usual ones.")
    warmups: int = option(1, "How often every method answers the first question untimed.")
    time_limit: float = option(300.0, "Maximum seconds of a method per turn; beyond it the answer is an error row.")
    check: bool = option(True, "Compare every output with plain decoding, token by token.")
    resamples: int = option(2000, "Bootstrap resamples of the questions behind every interval.")
    output: str = option("", "Run folder; empty: runs/ and the configuration's name.")

    def __post_init__(self) -> None:
        check_least(self, 1, "max_new_tokens", "resamples")
        check_least(self, 0, "threads", "num_questions", "per_category", "warmups", "seed", "temperature")
        check(self.time_limit > 0 and isfinite(self.time_limit), "time_limit", "above 0", self.time_limit)
        for column in self.columns:
            check_known("columns", column, COLUMNS)
        for metric in self.metrics:
            check_known("metric", metric, METRICS)
        check(len(set(self.methods)) == len(self.methods), "methods", "different names", list(self.methods))
        self._check_methods()

    def _check_methods(self) -> None:
        names = self.methods
        check(bool(names), "methods", "at least one name", list(names))
        methods = [parse_method(name) for name in names]
        if self.check and "plain" not in names:
            raise ValueError("check compares with plain decoding: add plain to methods, or set check: false")
        if self.baseline != AUTO:
            check_known("baseline", self.baseline, names)
        elif not any(method.kind in PLAIN_KINDS for method in methods):
            raise ValueError("baseline auto needs plain or transformers among the methods; add one, or name a baseline")


def as_record(config: RunConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The keys that affect a run's figures, as plain values. Keys that an older record lacks have their defaults."""
    values = as_plain(RunConfig()) | (dict(config) if isinstance(config, Mapping) else as_plain(config))
    return {name: value for name, value in values.items() if name not in NOT_RECORDED}
