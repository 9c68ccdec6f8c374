"""`Row`: what executors read of a sequence that is being decoded. `selfspec.decoding.row.Row` implements it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from selfspec.control.rows import RowState
from selfspec.drafting.row_lookup import RowLookup
from selfspec.executors.pick import Sampling


class Stopper(Protocol):
    """The tokens that end a row: `ends`."""

    @property
    def ends(self) -> Collection[int]: ...


class Request(Protocol):
    """How a row's tokens are picked, and what is reported about them."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def logits_processor(self) -> Sequence[Any]: ...
    @property
    def keep_logits(self) -> bool: ...
    @property
    def speculative(self) -> bool: ...
    @property
    def logprobs(self) -> int | None: ...


class Row(Protocol):
    """A sequence that is being decoded.

    Keys and values of its first `num_cached` tokens are valid. After the prefill these are all tokens but the last.
    """

    num_cached: int
    num_prompt_tokens: int

    @property
    def request_id(self) -> int: ...
    @property
    def request(self) -> Request: ...
    @property
    def stopper(self) -> Stopper: ...
    @property
    def pages(self) -> list[int]: ...
    @property
    def content(self) -> list[int]: ...
    @property
    def room(self) -> int: ...
    @property
    def lookup(self) -> RowLookup: ...
    @property
    def state(self) -> RowState: ...
    @property
    def has_ended(self) -> bool: ...
    def blamed(self) -> AbstractContextManager[None]: ...
