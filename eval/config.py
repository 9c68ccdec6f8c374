"""The one way to configure a command: a frozen dataclass, filled from a YAML file and then from the command line.

A field made by `option` is a key of the file and a flag of the same name; its sentence is the help of both:

    @dataclass(frozen=True, slots=True)
    class ReplayConfig(Common):
        lengths: tuple[int, ...] = option((128, 512), "Tokens per prompt.")

        def __post_init__(self) -> None:
            check_common(self)
            check_least(self, 1, "repeats")

    add_flags(parser, ReplayConfig)
    options = parser.parse_args()
    config = read_config(ReplayConfig, options.config, flags_given(options, ReplayConfig))

Fields are str, int, float, bool, tuple[..., ...], dict[str, str] or list[another dataclass]; the last have no flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from eval.questions import is_named

FOLDER = Path(__file__).parents[1] / "configs" / "eval"
Config = TypeVar("Config")


def option(default: Any, meaning: str, *, is_file: bool = False) -> Any:
    """A field of a configuration.

    Args:
        meaning: a sentence, the help of its flag.
        is_file: it names a file. One that a configuration file names is relative to that file.
    """
    about = {"help": meaning, "is_file": is_file}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=type(default), metadata=about)
    return dataclasses.field(default=default, metadata=about)


@dataclass(frozen=True, slots=True)
class Common:
    """What every command that opens a model can be told."""

    device: str = option("", "Where the model runs; empty: a GPU where there is one, else the CPU.")
    dtype: str = option("float32", "Number format of the weights; equality with plain decoding is promised in float32.")
    threads: int = option(0, "CPU threads of torch; 0 keeps torch's own default.")
    num_questions: int = option(0, "How many questions to use, from the first on; 0 uses all.")


def check_common(config: Common) -> None:
    """ValueError unless the fields of `Common` are in range."""
    check_least(config, 0, "threads", "num_questions")


def check(ok: bool, key: str, allowed: str, got: object) -> None:
    """ValueError with one sentence, unless it is ok."""
    if not ok:
        raise ValueError(f"{key} must be {allowed}, got {got!r}")


def check_least(config: Any, least: float, *keys: str) -> None:
    """ValueError unless each of these fields is a finite number of at least `least`."""
    for key in keys:
        value = getattr(config, key)
        check(isfinite(value) and value >= least, key, f"at least {least}", value)


def known(what: str, name: str, names: Iterable[str]) -> None:
    """ValueError unless `name` is among `names`; the closest of them is told."""
    names = list(names)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"
        raise ValueError(f"{what} {name!r} is unknown; {hint}")


def add_flags(parser: argparse.ArgumentParser, kind: type) -> None:
    """A flag for every field: lists as `--methods a b`, truths as `--check/--no-check`, mappings as `NAME=TEXT`."""
    kinds = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        form = kinds[field.name]
        origin, shape = typing.get_origin(form), dict[str, Any]()
        if origin is list:
            continue
        if form is bool:
            shape = {"action": argparse.BooleanOptionalAction}
        elif origin is tuple:
            shape = {"nargs": "*"}
        elif origin is dict:
            shape = {"nargs": "*", "metavar": "NAME=TEXT"}
        text = f"{field.metadata['help']}{_default(field.default)}".replace("%", "%%")
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=text, default=None, **shape)


def _default(value: Any) -> str:
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f" Default: {shown}." if shown and not isinstance(value, bool | dataclasses._MISSING_TYPE) else ""


def flags_given(options: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The values of the flags of `add_flags` that were given, by field.

    Raises:
        ValueError: a pair of a mapping that is not NAME=TEXT.
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
    """The configuration of a YAML file, with values that are given in place of the file's.

    Files that the YAML names are relative to it; those that are given, to the current folder.

    Raises:
        ValueError: the file cannot be read or is no mapping, or a key is unknown, of the wrong type or out of range.
    """
    values = _resolved(kind, _read(path), Path(path).parent)
    kinds = typing.get_type_hints(kind)
    for key in values:
        known("configuration key", str(key), kinds)
    made = OmegaConf.structured(kind)
    for key, value in {**values, **(given or {})}.items():
        try:
            made = OmegaConf.merge(made, {key: value})
        except (OmegaConfBaseException, TypeError) as problem:
            raise ValueError(f"{key} must be {_form(kinds[key])}, got {value!r}") from problem
    try:
        config: Any = OmegaConf.to_object(made)
    except MissingMandatoryValue as problem:
        raise ValueError(f"{problem.full_key} is missing; give it a value") from problem
    return config  # type: ignore[no-any-return]


def _form(kind: Any) -> str:
    """A field's type in words."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        return "a mapping of names to texts"
    if origin in (tuple, list):
        return f"a list of {_form(inner[0])}"
    if dataclasses.is_dataclass(kind):
        return f"mappings of {', '.join(field.name for field in dataclasses.fields(kind))}"
    return " or ".join(map(_form, inner)) if inner else f"{kind.__name__}"


def _read(path: str | Path) -> dict[Any, Any]:
    try:
        content = OmegaConf.load(path)
        values: Any = OmegaConf.to_container(content, resolve=True) if isinstance(content, DictConfig) else content
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as problem:
        text = " ".join(str(problem).split())
        raise ValueError(f"cannot read the configuration {str(path)!r}: {text}") from problem
    check(isinstance(values, dict), f"the configuration {str(path)!r}", "a mapping of keys to values", values)
    return dict(values)


def _resolved(kind: type, values: dict[Any, Any], folder: Path) -> dict[Any, Any]:
    """The values of a file in `folder` and its defaults; the files that they name are those beside it."""
    found, kinds = dict(values), typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        value, inner = values.get(field.name, field.default), typing.get_args(kinds[field.name])
        if field.metadata.get("is_file") and isinstance(value, str) and value and not is_named(value):
            found[field.name] = str(folder / value)
        elif isinstance(value, list) and inner and dataclasses.is_dataclass(inner[0]):
            of: Any = inner[0]
            found[field.name] = [_resolved(of, each, folder) if isinstance(each, dict) else each for each in value]
    return found
