"""Keys of a configuration: a dataclass's fields with a sentence each, checked, and read from a YAML file."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from types import UnionType
from typing import Any

import yaml


def knob(default: Any, meaning: str) -> Any:
    """A field of a configuration; its meaning is the help of its command-line option, too."""
    return dataclasses.field(default=default, metadata={"help": meaning})


def check_key(ok: bool, key: str, allowed: str, got: object) -> None:
    """ValueError with one sentence, unless it is ok."""
    if not ok:
        raise ValueError(f"{key} must be {allowed}, got {got!r}")


def read_mapping(path: str | Path) -> dict[Any, Any]:
    """What a YAML file holds, or ValueError where that is no mapping."""
    try:
        content = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        text = " ".join(str(problem).split())
        raise ValueError(f"cannot read the configuration {str(path)!r}: {text}") from problem
    check_key(isinstance(content, dict), f"the configuration {str(path)!r}", "a mapping of keys to values", content)
    return content


def read_keys(path: str | Path, kind: type) -> dict[str, Any]:
    """The values that a YAML file gives to keys of a dataclass, each of its field's type.

    Raises:
        ValueError: the file is missing or is no YAML mapping, or a key is unknown or of the wrong type.
    """
    content = read_mapping(path)
    kinds = typing.get_type_hints(kind)
    for key in content:
        if key not in kinds:
            raise ValueError(f"the configuration has no key {key!r}; known keys: {', '.join(kinds)}")
    return {key: convert(key, value, kinds[key]) for key, value in content.items()}


def convert(key: str, value: Any, kind: Any) -> Any:
    """A value of a YAML file as a key of this type."""
    if typing.get_origin(kind) is tuple:
        check_key(isinstance(value, list), key, "a list", value)
        return tuple(convert(key, each, typing.get_args(kind)[0]) for each in value)
    if fields := getattr(kind, "_fields", None):  # a NamedTuple of texts
        check_key(isinstance(value, dict) and set(value) == set(fields), key, f"mappings of {', '.join(fields)}", value)
        return kind(**{name: convert(f"{key}: {name}", text, str) for name, text in value.items()})
    if isinstance(kind, UnionType):  # a number, or a word in its place
        return value if isinstance(value, str) else convert(key, value, float)
    if kind is float and type(value) is int:
        return float(value)
    check_key(type(value) is kind, key, f"of type {kind.__name__}", value)
    return value
