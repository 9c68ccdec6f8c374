"""`RequestOutput`, what a caller gets of a request, in vLLM's words; `Outputs` makes them of an engine's rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from selfspec.decoding.request import Completion
from selfspec.decoding.results import Round, RowResult
from selfspec.decoding.stats import SpecStats

FinishReason = Literal["stop", "length", "abort"]
REASONS: dict[str, FinishReason] = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort"}


class Logprob(NamedTuple):
    """The target's log-probability of a token at a position, in nats, before penalties, temperature and filters."""

    logprob: float
    rank: int | None  # 1 is the likeliest
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` outputs of a request, or what a step added to it.

    Attributes:
        index: which of the `n`.
        text: without stop strings and special tokens; "" where there is no tokenizer.
        token_ids: new tokens, with the end-of-text token if there is one.
        finish_reason: "stop" (end of text, a stop string, token or criterion), "length", "abort"; None: it goes on.
        stop_reason: the stop string, or the id of the stop token, that ended it; None for an end of text.
        logprobs: per new token, by token id: the token itself and the likeliest; None where nobody asked.
        cumulative_logprob: the sum over the new tokens.
        stats: what was drafted and accepted, once it has ended.
        num_cached_tokens: tokens of the prompt that were in the cache before it was read, once it has ended.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    stats: SpecStats | None = None
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request came to (`LLM.generate`), or what a step added to it (`LLM.stream`, `LLMEngine.step`).

    Attributes:
        prompt_logprobs: per prompt token as `CompletionOutput.logprobs`, None for the first one; once output 0 has
            ended, and where asked.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(slots=True)
class Asked:
    """A request, and its outputs that have ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    n: int
    ended: dict[int, CompletionOutput] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        """A `RequestOutput` of the request that holds `outputs`."""
        is_finished = len(self.ended) == self.n
        told = self.prompt_logprobs
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, is_finished, told)


class Outputs:
    """Turns an engine's rounds into outputs; it maps each row to its request and output index.

    Args:
        tokenizer: turns tokens of `logprobs` into text; None: there is none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rows: dict[int, tuple[Asked, int]] = {}

    def add(self, row: int, asked: Asked, index: int) -> None:
        """The engine's row of that number is output `index` of a request."""
        self._rows[row] = asked, index

    def collect(self, round_: Round) -> None:
        """Store the outputs that ended in a round with their requests."""
        for row in round_.rows:
            if row.completion is not None and row.request_id in self._rows:
                asked, index = self._rows.pop(row.request_id)
                self._score(asked, row.completion)
                asked.ended[index] = self._whole(row.completion, index)

    def deltas(self, rounds: Iterable[Round]) -> Iterator[RequestOutput]:
        """What rounds added, row by row; rounds that added nothing to a row are left out."""
        for round_ in rounds:
            for row in round_.rows:
                if row.request_id in self._rows and (row.tokens or row.completion is not None):
                    yield self._delta(row)

    def _delta(self, row: RowResult) -> RequestOutput:
        asked, index = self._rows[row.request_id]
        logprobs = self._logprobs(row.logprobs)
        output = CompletionOutput(index, row.text, row.tokens, logprobs=logprobs)
        output = replace(output, cumulative_logprob=_sum(row.tokens, logprobs))
        if (done := row.completion) is not None:
            del self._rows[row.request_id]
            self._score(asked, done)
            asked.ended[index] = output = replace(
                output,
                finish_reason=REASONS[done.finish_reason],
                stop_reason=done.stop_reason,
                stats=done.stats,
                num_cached_tokens=done.num_cached_tokens,
            )
        return asked.output([output])

    def _whole(self, done: Completion, index: int) -> CompletionOutput:
        logprobs, reason = self._logprobs(done.logprobs), REASONS[done.finish_reason]
        total = _sum(done.tokens, logprobs)
        facts = logprobs, total, done.stats, done.num_cached_tokens
        return CompletionOutput(index, done.text, done.tokens, reason, done.stop_reason, *facts)

    def _score(self, asked: Asked, done: Completion) -> None:
        """Keep the log-probabilities of a prompt; those of all its rows are the same."""
        told = self._logprobs(done.prompt_logprobs)
        if told is not None and asked.prompt_logprobs is None:
            asked.prompt_logprobs = [None, *told]

    def _logprobs(self, given: Sequence[Any] | None) -> list[dict[int, Logprob]] | None:
        if given is None:
            return None
        made = []
        for own in given:
            by_token = {own.token: (own.logprob, own.rank)}
            by_token |= {token: (logprob, at + 1) for at, (token, logprob) in enumerate(own.top)}
            made.append({token: Logprob(*pair, self._text(token)) for token, pair in by_token.items()})
        return made

    def _text(self, token: int) -> str | None:
        return None if self._tokenizer is None else str(self._tokenizer.decode([token]))


def _sum(tokens: Sequence[int], logprobs: Sequence[dict[int, Logprob]] | None) -> float | None:
    if logprobs is None:
        return None
    return sum(of_token[token].logprob for token, of_token in zip(tokens, logprobs, strict=True))
