"""`Row`: the one mutable record of a sequence that is being decoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from selfspec.control.rows import RowState
from selfspec.decoding.request import Completion, Request
from selfspec.decoding.stats import SpecStats
from selfspec.decoding.stopping import FinishReason, Stopper
from selfspec.drafting.row_lookup import RowLookup
from selfspec.drafting.texts import Texts
from selfspec.executors.logprobs import TokenLogprobs


@dataclass(slots=True, eq=False)
class Row:
    """A sequence in the running batch. Valid keys and values: all of its content but the last token."""

    request_id: int
    request: Request
    stopper: Stopper
    pages: tuple[int, ...]  # no list: executors compare page tables with those that they were given before
    content: list[int]  # prompt and output
    num_cached: int = 0  # tokens with keys and values; content - 1 whenever a round begins
    finish_reason: FinishReason | None = None
    stats: SpecStats = field(default_factory=SpecStats)
    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its tokens, where asked
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens read so far, likewise
    has_raised: bool = False  # its own processor or criterion did, or it was interrupted: the engine cancels it
    has_pages: bool = True  # they are given back once
    texts: tuple[Texts, ...] = ()  # that it looks in besides its own
    num_prompt_tokens: int = 0
    num_found: int = 0  # tokens of the prompt that were in the cache already
    limit: int = 0  # tokens its content may come to
    num_edits: int | None = None  # of weights in place, before it joined; see `PrefixCache`
    blocks: list[Any] = field(default_factory=list)  # its first pages, which other rows may read; see `PrefixCache`
    _lookup: RowLookup | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.request.prompt)
        self.limit = self.num_prompt_tokens + self.stopper.max_new_tokens

    @property
    def tokens(self) -> list[int]:
        return self.content[self.num_prompt_tokens :]

    @property
    def room(self) -> int:
        return self.limit - len(self.content)

    @property
    def is_read(self) -> bool:
        """Whether its next round may begin: all of its content but the last token has keys and values."""
        return self.num_cached == len(self.content) - 1

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def state(self) -> RowState:
        """What a policy may know of it."""
        length, processes = len(self.content), bool(self.request.logits_processor)
        is_sampled, speculates = self.request.sampling.temperature > 0, self.request.speculative
        room = self.limit - length
        return RowState(self.request_id, length, room, self.lookup, processes, is_sampled, speculates)

    @property
    def lookup(self) -> RowLookup:
        """What its text and others offer for drafts; an index is made when it is first asked for a match."""
        if self._lookup is None:
            self._lookup = RowLookup(self.content, self.texts)
        return self._lookup

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Around the caller's own code for this row: what it raises is this row's fault."""
        try:
            yield
        except BaseException:
            self.has_raised = True
            raise

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        seed = self.request.sampling.seed
        logits, scores = (self.logits, self.scores) if self.request.keep_logits else (None, None)
        text, tokens, reason = self.stopper.text, self.tokens, self.finish_reason
        logprobs = None if self.request.logprobs is None else self.logprobs
        of_prompt = None if self.request.prompt_logprobs is None else self.prompt_logprobs
        ended_by = self.stopper.stop_reason(tokens) if reason == "stop" else None
        told = logprobs, ended_by, self.num_found, of_prompt
        return Completion(self.request_id, tokens, text, reason, self.stats, seed, logits, scores, *told)

    def keep(self, tokens: list[int], logits: Tensor | None, scores: Tensor | None) -> None:
        """Take a round's kept tokens; keys and values beyond the new content are left to be overwritten."""
        self.content += tokens
        self.num_cached = len(self.content) - 1
        if logits is not None and scores is not None:
            self.logits += logits[: len(tokens)]
            self.scores += scores[: len(tokens)]
