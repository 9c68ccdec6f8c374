"""Configurations: frozen dataclasses, filled from a YAML file and then from the flags of a command.

    @dataclass(frozen=True, slots=True)
    class Config:
        seed: int = option(0, "Seed of the noise.")

    add_flags(parser, Config)                                           # --seed, with the same help text
    config = read_config(Config, options.config, flags_given(options))  # options = parser.parse_args()

Fields are str, int, float, bool, tuple[..., ...], dict[str, str], another dataclass (a section) or a list of
dataclasses, which has no flag. A key of a section is `section.key` in messages and `--section.key` as a flag.
Every error is a ValueError of one sentence that names the key. A section's own checks name its keys without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml  # comes with transformers

Config = TypeVar("Config")
FLAG = "flag of "  # prefix of a flag's attribute in the parser's result


def option(default: Any, meaning: str, is_file: Callable[[str], bool] | None = None) -> Any:
    """A field of a configuration.

    Args:
        meaning: the help text of its flag.
        is_file: whether a value is a file name; in a configuration file it is relative to that file.
    """
    metadata = {"help": meaning, "is_file": is_file}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=type(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check(ok: bool, key: str, allowed: str, got: object) -> None:
    """ValueError unless `ok`: `key` must be `allowed`."""
    if not ok:
        raise ValueError(f"{key} must be {allowed}, got {got!r}")


def check_least(config: object, least: float, *keys: str) -> None:
    """ValueError unless each of these fields is a finite number of at least `least`."""
    for key in keys:
        value = getattr(config, key)
        check(isfinite(value) and value >= least, key, f"at least {least}", value)


def check_positive(config: object, *keys: str) -> None:
    """ValueError unless each of these fields is a finite number above 0."""
    for key in keys:
        value = getattr(config, key)
        check(isfinite(value) and value > 0, key, "above 0", value)


def check_known(what: str, name: str, names: Iterable[str]) -> None:
    """ValueError unless `name` is one of `names`; the message suggests the closest one."""
    names = list(names)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"
        raise ValueError(f"{what} {name!r} is unknown; {hint}")


class _Leaf(NamedTuple):
    """A key that is no section."""

    name: str  # with its sections, separated by dots
    form: Any  # its type
    meaning: str
    default: Any


def _leaves(kind: Any, prefix: str = "", made: Any = None) -> Iterator[_Leaf]:
    """The keys of a configuration; `made` has the defaults of a section."""
    forms = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        form, factory = forms[field.name], field.default_factory
        own = field.default if factory is dataclasses.MISSING else factory()
        default = own if made is None else getattr(made, field.name)
        if dataclasses.is_dataclass(form):
            yield from _leaves(form, f"{prefix}{field.name}.", default)
        elif typing.get_origin(form) is not list:
            yield _Leaf(prefix + field.name, form, field.metadata.get("help", ""), default)


def add_flags(parser: argparse.ArgumentParser, kind: Any, short: Collection[str] = ()) -> None:
    """Add a flag for every key: lists as `--methods a b`, bools as `--check/--no-check`, mappings as `NAME=TEXT`.

    Args:
        short: keys of sections whose flags can be given without the section, too.
    """
    groups: dict[str, Any] = {}
    for name, form, meaning, default in _leaves(kind):
        section, _, key = name.rpartition(".")
        if section and section not in groups:
            groups[section] = parser.add_argument_group(section)
        flags = [f"--{each.replace('_', '-')}" for each in dict.fromkeys([name, key] if name in short else [name])]
        shape: dict[str, Any] = {"metavar": key.upper()}
        if form is bool:
            shape = {"action": argparse.BooleanOptionalAction}
        elif typing.get_origin(form) in (tuple, dict):
            shape = {"nargs": "*", "action": "extend"}
            shape["metavar"] = key.upper() if typing.get_origin(form) is tuple else "NAME=TEXT"
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        has_default = form is not bool and default not in (dataclasses.MISSING, "", (), {})
        text = f"{meaning}{f' Default: {shown}.' if has_default else ''}".replace("%", "%%")
        groups.get(section, parser).add_argument(*flags, dest=FLAG + name, help=text, default=None, **shape)


def flags_given(options: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags of `add_flags` that were given, by key.

    Raises:
        ValueError: a pair of a mapping is not NAME=TEXT.
    """
    given = {name: value for name, value in vars(options).items() if name.startswith(FLAG) and value is not None}
    return {name.removeprefix(FLAG): value for name, value in given.items()}


def read_config(kind: type[Config], path: str | Path, given: Mapping[str, Any] | None = None) -> Config:
    """Read a YAML file as a configuration; see `read_values` and `build`."""
    return build(kind, read_values(kind, path, given))


def read_values(kind: Any, path: str | Path, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a YAML file as nested mappings; the values `given`, by key, replace those of the file.

    File names in the YAML are relative to it; those of `given`, to the current folder.

    Raises:
        ValueError: the file cannot be read, or it or one of its sections is no mapping.
    """
    values = _resolve_files(kind, read_yaml(path), Path(path).parent)
    for name, value in (given or {}).items():
        section, _, key = name.rpartition(".")
        holder = values
        if section:
            own = values.get(section) or {}
            check(isinstance(own, dict), section, "a mapping of keys to values", own)
            holder = values[section] = dict(own)
        holder[key] = value
    return values


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ValueError: the file cannot be read or holds no mapping.
    """
    try:
        values = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as problem:
        text = " ".join(str(problem).split())
        raise ValueError(f"cannot read the configuration {str(path)!r}: {text}") from problem
    check(isinstance(values, dict), f"the configuration {str(path)!r}", "a mapping of keys to values", values)
    return dict(values)


def _resolve_files(kind: Any, values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The values of a YAML file in `folder`, with file names (defaults too) made relative to the current folder."""
    found, forms = dict(values), typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        value, inner = values.get(field.name, field.default), typing.get_args(forms[field.name])
        is_file = field.metadata.get("is_file")
        if is_file is not None and isinstance(value, str) and is_file(value):
            found[field.name] = str(folder / value)
        elif isinstance(value, list) and inner and dataclasses.is_dataclass(inner[0]):
            of = [_resolve_files(inner[0], each, folder) if isinstance(each, dict) else each for each in value]
            found[field.name] = of
    return found


def build(kind: type[Config], values: Any, where: str = "") -> Config:
    """Build a configuration from nested mappings, as YAML or JSON has them.

    Args:
        where: prefix of the keys in messages, such as "run.".

    Raises:
        ValueError: a key is unknown, missing, of the wrong type or out of range.
    """
    check(isinstance(values, dict), where.removesuffix(".") or "the configuration", "a mapping", values)
    made: Any = kind
    forms, fields = typing.get_type_hints(kind), dataclasses.fields(made)
    for key in values:
        check_known(f"{where.removesuffix('.')}: key" if where else "configuration key", str(key), forms)
    for field in fields:
        if field.name not in values and {field.default, field.default_factory} == {dataclasses.MISSING}:
            raise ValueError(f"{where}{field.name} is missing; give it a value")
    converted = {key: _converted(value, forms[key], where + key) for key, value in values.items()}
    try:
        return typing.cast("Config", made(**converted))
    except ValueError as problem:
        raise ValueError(f"{where}{problem}") from problem


def _converted(value: Any, form: Any, key: str) -> Any:
    """A value of YAML or of a flag as the type of its field. YAML reads 2e-4 as text, so text may be a number."""
    origin, inner = typing.get_origin(form), typing.get_args(form)
    if dataclasses.is_dataclass(form):
        return build(typing.cast("type[Any]", form), {} if value is None else value, f"{key}.")
    if origin in (tuple, list) and isinstance(value, tuple | list):
        each_key = f"{key}[{{}}]".format if origin is list else lambda i: key
        return origin(_converted(each, inner[0], each_key(i)) for i, each in enumerate(value))
    if origin is dict and isinstance(value, list) and all(isinstance(each, str) for each in value):  # of a flag
        value = dict(_pair(key, each) for each in value)
    if origin is dict and isinstance(value, dict):
        return {str(name): _converted(text, inner[1], f"{key}.{name}") for name, text in value.items()}
    accepted = {bool: bool, int: int | str, float: int | float | str, str: str | int | float}.get(form)
    if accepted is not None and isinstance(value, accepted) and isinstance(value, bool) == (form is bool):
        try:
            return form(value)
        except ValueError:  # text that is no number
            pass
    raise ValueError(f"{key} must be {_described(form)}, got {value!r}")


def _pair(key: str, text: str) -> tuple[str, str]:
    name, _, rest = text.partition("=")
    check(bool(name and rest), key, "NAME=TEXT", text)
    return name, rest


def _described(form: Any) -> str:
    if typing.get_origin(form) is dict:
        return "a mapping of names to texts"
    if typing.get_origin(form) in (tuple, list):
        return "a list"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[form]


def as_plain(config: Any) -> dict[str, Any]:
    """A configuration as nested dicts and lists, as JSON has them."""
    return typing.cast("dict[str, Any]", json.loads(json.dumps(dataclasses.asdict(config))))


def differences(saved: Any, config: Any, ignored: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """The keys in which a saved configuration differs from this one, with both values.

    Args:
        saved: nested mappings; a key that is missing has its default.
        ignored: keys and sections that may differ.
    """
    kind, found = type(config), {}
    before, default, now = saved if isinstance(saved, dict) else {}, as_plain(kind()), as_plain(config)
    for leaf in _leaves(kind):
        section, _, key = leaf.name.rpartition(".")
        old, new = ((of.get(section) or {}) if section else of for of in (before, now))
        own = default[section][key] if section else default[key]
        if not {leaf.name, section} & set(ignored) and old.get(key, own) != new[key]:
            found[leaf.name] = old.get(key, own), new[key]
    return found
