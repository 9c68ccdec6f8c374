"""Configurations: a frozen dataclass per command, filled from a YAML file and then from the command line.

A field made by `option` is a key of the file and a flag of the same name; its help text is that of both:

    config = read_config(RunConfig, options.config, flags_given(options, RunConfig))

where `options` come from a parser that `add_flags(parser, RunConfig)` has filled. Fields are str, int, float, bool,
tuple[..., ...], dict[str, str] or list[another dataclass]; a list has no flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import shlex
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import yaml

from eval.methods import PLAIN_KINDS, parse_method
from eval.metrics import METRICS
from eval.questions import COLUMNS, NAMED_SETS, is_named

FOLDER = Path(__file__).parents[1] / "configs" / "eval"
AUTO = "auto"
STUDIES = ("acceptance", "grid", "batch", "policies")
STUDY_SIZES = ("study_questions", "study_tokens")
NOT_RECORDED = ("output", "studies", *STUDY_SIZES)  # these may change when a run is resumed
Config = TypeVar("Config")


def option(default: Any, meaning: str, *, is_file: bool = False) -> Any:
    """A field of a configuration.

    Args:
        meaning: the help text of its flag.
        is_file: the value is a file name; in a configuration file it is relative to that file.
    """
    metadata = {"help": meaning, "is_file": is_file}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=type(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


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
        "Question file (JSON lines); a parquet, CSV or JSON file or folder, or hf:OWNER/NAME[:CONFIG:SPLIT]; or the "
        f"name of a set: {', '.join(NAMED_SETS)}.",
        is_file=True,
    )
    questions_path: str = option("", "File of a named set; named sets are not part of the repository.", is_file=True)
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
    externals: dict[str, str] = option({}, "Command line of every external:NAME among the methods, by its name.")
    baseline: str = option(AUTO, "Method that speedups are over; 'auto': the fastest plain decoding in the run.")
    metrics: tuple[str, ...] = option((), "Columns of the report's first table; none given: the usual ones.")
    warmups: int = option(1, "How often every method answers the first question untimed.")
    cost_repeats: int = option(
        0,
        "How often every piece of a round is timed, for policies that use costs, within ten seconds; 0: the table in "
        "the user's cache, which is measured when it is missing.",
    )
    time_limit: float = option(300.0, "Maximum seconds of a method per turn; beyond it the answer is an error row.")
    check: bool = option(True, "Compare every output with plain decoding, token by token.")
    keep_rounds: bool = option(False, "Write every round of selfspec's methods to rounds.jsonl.")
    resamples: int = option(2000, "Bootstrap resamples of the questions behind every interval.")
    studies: tuple[str, ...] = option(
        (), f"Studies to make after the questions: {', '.join(STUDIES)}. They can be added to a finished run."
    )
    study_questions: int = option(
        6,
        "How many questions a study uses, evenly from all categories; their first turns. When it changes, studies are "
        "made again.",
    )
    study_tokens: int = option(40, "Tokens per question that a study decodes; policies by replay use max_new_tokens.")
    output: str = option("", "Run folder; empty: runs/ and the configuration's name.")

    def __post_init__(self) -> None:
        check_common(self)
        check_least(self, 1, "max_new_tokens", "resamples", *STUDY_SIZES)
        check_least(self, 0, "per_category", "warmups", "cost_repeats", "seed", "temperature")
        check(self.time_limit > 0 and isfinite(self.time_limit), "time_limit", "above 0", self.time_limit)
        names_of = {"columns": (self.columns, COLUMNS), "metric": (self.metrics, METRICS)}
        for what, (names, allowed) in {**names_of, "study": (self.studies, STUDIES)}.items():
            for name in names:
                known(what, name, allowed)
        for key in ("studies", "methods"):
            names = getattr(self, key)
            check(len(set(names)) == len(names), key, "different names", list(names))
        self._check_methods()

    def _check_methods(self) -> None:
        names = self.methods
        check(bool(names), "methods", "at least one name", list(names))
        for name, command in self.externals.items():
            check(_is_command(command), f"externals: {name}", "a command line, its quotes closed", command)
        methods = [parse_method(name) for name in names]
        for method in methods:
            if method.kind == "external":
                known(f"externals has no command line for {method.name!r}; name", method.option, self.externals)
        if self.check and "plain" not in names:
            raise ValueError("check compares with plain decoding: add plain to methods, or set check: false")
        if self.baseline != AUTO:
            known("baseline", self.baseline, names)
        elif not any(method.kind in PLAIN_KINDS for method in methods):
            raise ValueError("baseline auto needs plain or transformers among the methods; add one, or name a baseline")


def _is_command(text: str) -> bool:
    try:
        return bool(shlex.split(text))
    except ValueError:
        return False


def read_run_config(path: str | Path, given: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a run's configuration, see `read_config`; the default output folder is in runs/."""
    config = read_config(RunConfig, path, given)
    return dataclasses.replace(config, output=config.output or str(Path("runs") / Path(path).stem))


def as_record(config: RunConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The keys that affect a run's figures, as plain values. Keys that an older record lacks have their defaults."""
    values = {
        **dataclasses.asdict(RunConfig()),
        **(config if isinstance(config, Mapping) else dataclasses.asdict(config)),
    }
    kept = {name: value for name, value in values.items() if name not in NOT_RECORDED}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}


def check(ok: bool, key: str, allowed: str, got: object) -> None:
    """ValueError unless `ok`: `key` must be `allowed`."""
    if not ok:
        raise ValueError(f"{key} must be {allowed}, got {got!r}")


def check_least(config: Any, least: float, *keys: str) -> None:
    """ValueError unless each of these fields is a finite number of at least `least`."""
    for key in keys:
        value = getattr(config, key)
        check(isfinite(value) and value >= least, key, f"at least {least}", value)


def check_common(config: Common) -> None:
    """ValueError unless the fields of `Common` are in range."""
    check_least(config, 0, "threads", "num_questions")


def known(what: str, name: str, names: Iterable[str]) -> None:
    """ValueError unless `name` is one of `names`; the message suggests the closest one."""
    names = list(names)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"
        raise ValueError(f"{what} {name!r} is unknown; {hint}")


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add a flag for every field: lists as `--methods a b`, bools as `--check/--no-check`, mappings as `NAME=TEXT`."""
    kinds = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        form, default = kinds[field.name], field.default
        shape: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if form is bool else {}
        if typing.get_origin(form) in (tuple, dict):
            shape = {"nargs": "*", "action": "extend"}
            shape |= {} if typing.get_origin(form) is tuple else {"metavar": "NAME=TEXT"}
        elif typing.get_origin(form) is list:
            continue
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        has_default = shown and not isinstance(default, bool | dataclasses._MISSING_TYPE)
        text = f"{field.metadata['help']}{f' Default: {shown}.' if has_default else ''}".replace("%", "%%")
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=text, default=None, **shape)


def flags_given(options: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The values of the flags of `add_flags` that were given, by field.

    Raises:
        ValueError: a pair of a mapping is not NAME=TEXT.
    """
    kinds = typing.get_type_hints(kind)
    given = {name: value for name in kinds if (value := getattr(options, name, None)) is not None}
    return {name: _pairs(name, v) if typing.get_origin(kinds[name]) is dict else v for name, v in given.items()}


def _pairs(name: str, given: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for key, sign, text in pairs:
        if not (key and sign and text):
            raise ValueError(f"--{name.replace('_', '-')} takes NAME=TEXT, got {key + sign + text!r}")
    return {key: text for key, _, text in pairs}


def read_config(kind: type[Config], path: str | Path, given: Mapping[str, Any] | None = None) -> Config:
    """Read a YAML file as a configuration; the values `given` replace those of the file.

    File names in the YAML are relative to it; those of `given`, to the current folder.

    Raises:
        ValueError: the file cannot be read or is no mapping, or a key is unknown, of the wrong type or out of range.
    """
    values = _resolve_files(kind, _read(path), Path(path).parent)
    kinds = typing.get_type_hints(kind)
    for key in values:
        known("configuration key", str(key), kinds)
    made = {}
    for key, value in {**values, **(given or {})}.items():
        try:
            made[key] = _converted(value, kinds[key], key)
        except TypeError:
            raise ValueError(f"{key} must be {_describe_type(kinds[key])}, got {value!r}") from None
    return kind(**made)


def _converted(value: Any, kind: Any, key: str) -> Any:
    """A value of YAML or of a flag as the type of its field; TypeError where it is of another type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (tuple, list) and isinstance(value, tuple | list):
        return origin(_converted(each, inner[0], f"{key}[{i}]") for i, each in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {str(name): _converted(text, inner[1], f"{key}.{name}") for name, text in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        kinds, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
        if not value.keys() <= kinds.keys():
            raise TypeError
        for field in fields:
            if field.name not in value and {field.default, field.default_factory} == {dataclasses.MISSING}:
                raise ValueError(f"{key}.{field.name} is missing; give it a value")
        made: Any = kind
        return made(**{name: _converted(each, kinds[name], f"{key}.{name}") for name, each in value.items()})
    accepted = {bool: bool, int: int | str, float: int | float | str, str: str | int | float}.get(kind)
    if accepted is None or not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
        raise TypeError
    try:
        return kind(value)
    except ValueError:  # text that is no number
        raise TypeError from None


def _describe_type(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        return "a mapping of names to texts"
    if origin in (tuple, list):
        return f"a list of {_describe_type(inner[0])}"
    if dataclasses.is_dataclass(kind):
        return f"mappings of {', '.join(field.name for field in dataclasses.fields(kind))}"
    return " or ".join(map(_describe_type, inner)) if inner else f"{kind.__name__}"


def _read(path: str | Path) -> dict[Any, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as problem:
        text = " ".join(str(problem).split())
        raise ValueError(f"cannot read the configuration {str(path)!r}: {text}") from problem
    check(isinstance(values, dict), f"the configuration {str(path)!r}", "a mapping of keys to values", values)
    return dict(values)


def _resolve_files(kind: type, values: dict[Any, Any], folder: Path) -> dict[Any, Any]:
    """The values of a YAML file in `folder`, with file names (defaults too) made relative to the current folder."""
    found, kinds = dict(values), typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        value, inner = values.get(field.name, field.default), typing.get_args(kinds[field.name])
        if field.metadata.get("is_file") and isinstance(value, str) and value and not is_named(value):
            found[field.name] = str(folder / value)
        elif isinstance(value, list) and inner and dataclasses.is_dataclass(inner[0]):
            of: Any = inner[0]
            found[field.name] = [_resolve_files(of, each, folder) if isinstance(each, dict) else each for each in value]
    return found
