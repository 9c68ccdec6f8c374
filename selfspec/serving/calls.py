"""`Call`: a client's request and what came of it. It lives in the event loop's thread; the engine's thread names it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

from selfspec.core import FinishReason
from selfspec.decoding.outputs import CompletionOutput, Logprob, RequestOutput, SpecStats
from selfspec.params import SamplingParams
from selfspec.serving.refusal import Refusal

PromptLogprobs = list[dict[int, Logprob] | None]


@dataclass(slots=True)
class Choice:
    """One output of a call: what came of it since it was last read, and what it came to.

    What a reader has not taken yet is put together, so that a slow one costs no more memory than the output.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    stats: SpecStats | None = None
    is_new: bool = False  # something came since it was last read
    all_token_ids: list[int] = field(default_factory=list)  # that came so far
    num_read: int = 0  # that were taken before
    first_at: float | None = None  # seconds of the monotonic clock, of the first token
    last_at: float | None = None  # of the last piece

    def add(self, output: CompletionOutput, now: float) -> None:
        """Take what a round added."""
        self.text += output.text
        self.token_ids += output.token_ids
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + output.logprobs
        self.finish_reason, self.stop_reason, self.stats = output.finish_reason, output.stop_reason, output.stats
        self.is_new = True
        self.all_token_ids += output.token_ids
        if output.token_ids:
            self.first_at, self.last_at = self.first_at or now, now

    @property
    def num_tokens(self) -> int:
        """Tokens that came so far."""
        return len(self.all_token_ids)

    def take(self) -> Choice:
        """What came since the last time, as an object of its own."""
        taken = replace(self)
        self.num_read = self.num_tokens
        self.text, self.token_ids, self.logprobs, self.is_new = "", [], None, False
        return taken


class Call:
    """Prompts of one client, each continued `params.n` times.

    Args:
        name: a text that no other call has.
        prompts: their token ids.
        params: for all of them.
        max_length: most tokens of a prompt and an output.
        seconds: after which it is ended.
        drops_output: nobody wants new tokens: the engine decodes at least one, which is left out.
        streams: outputs are read while they grow, and not at the end alone.
        reserve: see `LLMEngine.add_request`.
    """

    def __init__(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        max_length: int,
        seconds: float,
        drops_output: bool = False,
        streams: bool = True,
        reserve: int | None = None,
    ) -> None:
        self.name, self.prompts, self.params, self.streams = name, prompts, params, streams
        self._max_length, self._drops_output, self.reserve = max_length, drops_output, reserve
        self.grammar_field: str | None = None
        """The request's field that asks for structured outputs."""
        self.arrived = monotonic()
        self.deadline = self.arrived + seconds
        self.started: float | None = None  # when the first of its prompts got a place
        self.choices = [Choice(index) for index in range(self.num_rows)]
        self.prompt_logprobs: list[PromptLogprobs | None] = [None] * len(prompts)
        self.num_cached_tokens = 0  # of prompts, that were in the cache
        self._num_growing = self.num_rows  # outputs that have not ended
        self._error: Refusal | None = None
        self._is_accepted = False
        self._update = asyncio.Event()

    @property
    def num_rows(self) -> int:
        """Outputs."""
        return len(self.prompts) * self.params.n

    def params_of(self, prompt: int) -> SamplingParams:
        """Those of a prompt, whose outputs end at the length limit."""
        most = self._max_length - len(self.prompts[prompt])
        return self.params if (self.params.max_tokens or most + 1) <= most else self.params.limited(most)

    def num_remaining(self, choice: Choice) -> int:
        """Most tokens that an output still gets."""
        most = self._max_length - len(self.prompts[choice.index // self.params.n])
        return 0 if choice.finish_reason else min(self.params.max_tokens or most, most) - choice.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_tokens(self) -> int:
        """New tokens so far."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._error is not None or not self._num_growing

    def accept(self) -> None:
        """The engine has taken it."""
        self._is_accepted = True
        self._update.set()

    def fail(self, error: Refusal) -> None:
        """It ends here."""
        self._error = error
        self._update.set()

    def add(self, prompt: int, output: RequestOutput, now: float) -> list[tuple[Choice, float | None]]:
        """Take what a round added to the outputs of a prompt; these outputs, and when their piece before came."""
        changed = []
        for own in output.outputs:
            if self._drops_output:
                own = _emptied(own)
            choice = self.choices[prompt * self.params.n + own.index]
            changed.append((choice, choice.last_at))
            choice.add(own, now)
            self._num_growing -= own.finish_reason is not None
            if own.index == 0 and own.finish_reason is not None:
                self.num_cached_tokens += own.num_cached_tokens or 0
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = output.prompt_logprobs
        if self.streams or self.has_ended:
            self._update.set()
        return changed

    async def accepted(self) -> None:
        """Wait until the engine has taken it.

        Raises:
            Refusal: it has not, or the call was ended.
        """
        await self._until(lambda: self._is_accepted)

    async def changes(self) -> AsyncIterator[list[Choice]]:
        """What is new of outputs, whenever there is something.

        Raises:
            Refusal: the call was ended.
        """
        while True:
            if taken := [choice.take() for choice in self.choices if choice.is_new]:
                yield taken
            elif self.has_ended:
                await self.ended()
                return
            else:
                self._update.clear()
                await self._update.wait()

    async def ended(self) -> None:
        """Wait for all of it.

        Raises:
            Refusal: the call was ended.
        """
        await self._until(lambda: self.has_ended)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while self._error is None and not holds():
            self._update.clear()
            await self._update.wait()
        if self._error is not None:
            raise self._error


def _emptied(output: CompletionOutput) -> CompletionOutput:
    """The same without tokens."""
    reason: FinishReason | None = None if output.finish_reason is None else "length"
    return replace(output, text="", token_ids=[], logprobs=output.logprobs and [], finish_reason=reason)
