"""Read a YAML file into dataclasses, and compare the configurations of two runs.

PyYAML comes with transformers, so a machine that can train can also read these files.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from train.sections import check

Config = TypeVar("Config")


def read_file(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file into nested mappings, and change keys of it.

    Args:
        overrides: `section.key=value` each; the value is YAML.

    Raises:
        ValueError: the file cannot be read or holds no mapping, or an override is not of this form.
    """
    for override in overrides:
        key, equals, _ = override.partition("=")
        check(key.count(".") == 1 and bool(equals), "an override", "of the form section.key=value", override)
    try:
        content = yaml.safe_load(Path(path).read_text("utf-8"))
        given = [(override.partition("=")[0], yaml.safe_load(override.partition("=")[2])) for override in overrides]
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"cannot read the configuration {' '.join([str(path), *overrides])!r}: {reason}") from error
    check(isinstance(content, dict), f"the configuration {path}", "a mapping", content)
    for key, value in given:
        section, _, name = key.partition(".")
        values = content.get(section) or {}
        check(isinstance(values, dict), section, "a mapping", values)
        content[section] = {**values, name: value}
    return typing.cast("dict[str, Any]", content)


def build(kind: type[Config], content: Any) -> Config:
    """Build a dataclass whose fields are sections, themselves dataclasses, from nested mappings.

    Raises:
        ValueError: a key is unknown, of the wrong type, or refused by its section.
    """
    check(isinstance(content, dict), "the configuration", "a mapping", content)
    sections = typing.get_type_hints(kind)
    made = {}
    for section, values in content.items():
        check_known(section, sections, "the configuration")
        check(values is None or isinstance(values, dict), section, "a mapping", values)
        types = typing.get_type_hints(sections[section])
        given = {}
        for key, value in (values or {}).items():
            check_known(key, types, section)
            try:
                given[key] = convert(value, types[key])
            except (TypeError, ValueError):
                raise ValueError(f"{section}.{key} must be {_describe(types[key])}, got {value!r}") from None
        made[section] = sections[section](**given)
    return kind(**made)


def convert(value: Any, kind: Any) -> Any:
    """Convert a value of YAML to the type of a field: bool, int, float, str, or a tuple of one of these.

    YAML reads 2e-4 as text, so text that is a number is accepted for a float; a number is accepted as text.

    Raises:
        TypeError, ValueError: it is of another type.
    """
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError
        return tuple(convert(each, typing.get_args(kind)[0]) for each in value)
    accepted = {bool: bool, int: int, float: int | float | str, str: str | int | float}[kind]
    if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
        raise TypeError
    return kind(value)


def check_known(name: str, known: Iterable[Any], owner: str) -> None:
    """Raise ValueError where `name` is none of the names that `owner` has."""
    names = [str(each) for each in known]
    if name not in names:
        close = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"{owner} has no key {name!r}; {hint}known keys: {', '.join(names)}")


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list of {typing.get_args(kind)[0].__name__}"
    return f"of type {kind.__name__}"


def plain(config: Any) -> dict[str, dict[str, Any]]:
    """Return a configuration as nested dicts and lists, as JSON has them."""
    return typing.cast("dict[str, dict[str, Any]]", json.loads(json.dumps(dataclasses.asdict(config))))


def different_keys(saved: Any, config: Any, ignored: Collection[str]) -> list[str]:
    """Name the keys, as `section.key`, in which a saved configuration differs from this one.

    Args:
        saved: nested mappings; a key that is missing has its default.
        ignored: sections and keys that may differ.
    """
    defaults, saved = plain(type(config)()), saved if isinstance(saved, dict) else {}
    return [
        f"{section}.{key}"
        for section, values in plain(config).items()
        for key, value in values.items()
        if not {section, f"{section}.{key}"} & set(ignored)
        and saved.get(section, {}).get(key, defaults[section][key]) != value
    ]
