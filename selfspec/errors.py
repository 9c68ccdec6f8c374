"""Exceptions of selfspec, and checks of arguments. Every message is one sentence that says what to do."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from numbers import Real
from typing import TypeGuard


class UnsupportedModelError(RuntimeError):
    """The model cannot be split into draft layers and verification layers."""


class NoCompilerError(RuntimeError):
    """The compiled engine cannot be built: there is no C++ compiler, or it fails.

    Attributes:
        reason: a clause that says why.
        remedy: a clause that says what to do.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"backend 'compiled' needs a C++ compiler, and {reason}; {remedy}, or choose backend auto")
        self.reason, self.remedy = reason, remedy


class GrammarError(ValueError):
    """The grammar of a request's structured outputs cannot be followed further."""


class CacheFullError(ValueError):
    """A request needs more cached tokens than the engine has."""


class DatastoreError(ValueError):
    """A file is no datastore, is damaged, or has another tokenizer or format."""


def whole(name: str, value: object, least: int | None = None) -> int:
    """Return `value` as an int; ValueError where it is no integer or is below `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be a whole number{bound}, {got(value)}")
    return number


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def got(value: object) -> str:
    """The end of an error message about an argument."""
    return "got None; leave it out for the default" if value is None else f"got {value!r}"


def flag(name: str, value: object) -> bool:
    """Return `value`; ValueError where it is no bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, {got(value)}")
    return value


def refuse_empty(name: str, texts: Iterable[object]) -> None:
    """Raise ValueError unless all are non-empty texts."""
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must hold non-empty texts, {got(text)}")
