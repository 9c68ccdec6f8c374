"""The errors a caller can meet, beside the built-in ones: each message is one sentence that says what to do."""

from __future__ import annotations


class UnsupportedModelError(RuntimeError):
    """The model cannot be split into a draft and a verification that agree with it."""


class CacheFullError(ValueError):
    """A request needs more cached tokens than the engine was given."""
