"""The errors a caller can meet, beside the built-in ones: each message is one sentence that says what to do."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from numbers import Real
from typing import TypeGuard


class UnsupportedModelError(RuntimeError):
    """The model cannot be split into a draft and a verification that agree with it."""


class NoCompilerError(RuntimeError):
    """Layers that are to be compiled on this machine cannot be: no C++ compiler, or one that fails.

    Attributes:
        reason: why, half a sentence.
        remedy: what to do about it, likewise.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"engine 'compiled' needs a C++ compiler, and {reason}; {remedy}, or choose engine auto")
        self.reason, self.remedy = reason, remedy


class CacheFullError(ValueError):
    """A request needs more cached tokens than the engine was given."""


class DatastoreError(ValueError):
    """A file is no datastore, is damaged, or is one of another tokenizer or format."""


def whole(name: str, value: object, least: int | None = None) -> int:
    """`value` as an int; ValueError when it is no whole number or below `least`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be a whole number{bound}, {got(value)}")
    return number


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number: no text, no truth value, no tensor."""
    return isinstance(value, Real) and not isinstance(value, bool)


def got(value: object) -> str:
    """How a message ends that says what an option must be."""
    return "got None; leave it out for the default" if value is None else f"got {value!r}"


def flag(name: str, value: object) -> bool:
    """`value` if it is True or False, else ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, {got(value)}")
    return value


def refuse_empty(name: str, texts: Iterable[object]) -> None:
    """ValueError unless these are texts of at least a character."""
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must hold non-empty texts, {got(text)}")


def refuse_unknown(given: Iterable[str], allowed: Collection[str]) -> None:
    """TypeError where an option is given that there is not."""
    for name in given:
        if name not in allowed:
            raise TypeError(f"there is no option {name!r}; the options are {', '.join(sorted(allowed))}")
