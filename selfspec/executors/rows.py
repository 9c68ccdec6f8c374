"""`Row`: what executors read of a sequence that is being decoded. `selfspec.decoding.row.Row` implements it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from selfspec.control.rows import RowState
from selfspec.drafting.row_lookup import RowLookup
from selfspec.executors.logprobs import TokenLogprobs
from selfspec.executors.pick import Sampling


class Stopper(Protocol):
    """What ends a row."""

    @property
    def ends(self) -> Collection[int]: ...  # the tokens that do
    @property
    def ends_by_token(self) -> bool: ...  # only they and the length do; False: text or criteria may, too


class Request(Protocol):
    """How a row's tokens are picked, and what is reported about them."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def logits_processor(self) -> Sequence[Any]: ...
    @property
    def keep_logits(self) -> bool: ...  # return the logits of the emitted tokens
    @property
    def speculative(self) -> bool: ...  # False: the row never drafts
    @property
    def logprobs(self) -> int | None: ...  # most probable tokens to report per position; None: no log-probabilities
    @property
    def prompt_logprobs(self) -> int | None: ...  # the same for the tokens of the prompt


class Row(Protocol):
    """A sequence that is being decoded.

    Keys and values of its first `num_cached` tokens are valid. After the prefill these are all tokens but the last.
    """

    num_cached: int
    num_prompt_tokens: int
    prompt_logprobs: list[TokenLogprobs]  # of the prompt's tokens read so far but the first, where asked

    @property
    def request_id(self) -> int: ...
    @property
    def request(self) -> Request: ...
    @property
    def stopper(self) -> Stopper: ...
    @property
    def pages(self) -> tuple[int, ...]: ...  # its KV pages, in order
    @property
    def content(self) -> list[int]: ...  # prompt and output tokens
    @property
    def room(self) -> int: ...  # tokens that it may still emit
    @property
    def lookup(self) -> RowLookup: ...  # its drafts by lookup
    @property
    def state(self) -> RowState: ...  # what policies know of it
    @property
    def has_ended(self) -> bool: ...
    def blamed(self) -> AbstractContextManager[None]: ...  # errors raised inside are errors of this row's request
