"""`Texts`: where drafts by lookup may come from besides a row's own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Match(Protocol):
    """An occurrence of a context's last tokens."""

    @property
    def length(self) -> int: ...  # matched tokens


class Texts(Protocol):
    """Texts that rows look in: finished responses (`responses`) or a corpus (`datastore`). Safe for several threads."""

    @property
    def source(self) -> int:
        """One of `selfspec.control.plan.SOURCES`."""
        ...

    def find(self, context: Sequence[int]) -> Match | None:
        """The longest suffix of a context that occurs here with a continuation."""
        ...

    def continuation(self, match: Any, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that follow a match, up to the end of its text."""
        ...

    def compiled(self) -> Sequence[Any] | None:
        """The texts for compiled rounds, each with an `address`; held by the caller as long. None: not compiled."""
        ...
