"""The errors a caller can meet, beside the built-in ones: each message is one sentence that says what to do."""

from __future__ import annotations

import operator


class UnsupportedModelError(RuntimeError):
    """The model cannot be split into a draft and a verification that agree with it."""


class NoCompilerError(RuntimeError):
    """Layers that are to be compiled on this machine cannot be: no C++ compiler, or one that fails."""


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
        raise ValueError(f"{name} must be a whole number{bound}, got {value!r}")
    return number
