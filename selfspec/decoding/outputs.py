"""`RequestOutput`, what a caller gets of a request, in vLLM's words; `RequestOutputs` makes them of rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from selfspec.core import FinishReason, Request, RoundOutput, RowRound


@dataclass(slots=True)
class SpecStats:
    """Counts of one request, or of many when added together.

    A step is a round in which the row had at least one drafted token; rounds without a draft count as plain steps. A
    step cut short by an end of text counts the drafted tokens that were kept.
    """

    acceptance_histogram_by_draft_length: dict[int, Counter[int]] = field(default_factory=dict)
    num_plain_steps: int = 0
    num_generated_tokens: int = 0

    def add_round(self, drafted: int, accepted: int, emitted: int) -> None:
        self.num_generated_tokens += emitted
        if drafted == 0:
            self.num_plain_steps += 1
            return
        counts = self.acceptance_histogram_by_draft_length.get(drafted)
        if counts is None:
            counts = self.acceptance_histogram_by_draft_length[drafted] = Counter()
        counts[accepted] = counts.get(accepted, 0) + 1

    def __add__(self, other: SpecStats) -> SpecStats:
        total = SpecStats({}, self.num_plain_steps + other.num_plain_steps, self.num_generated_tokens)
        total.num_generated_tokens += other.num_generated_tokens
        for part in (self, other):
            for length, counts in part.acceptance_histogram_by_draft_length.items():
                total.acceptance_histogram_by_draft_length.setdefault(length, Counter()).update(counts)
        return total

    @property
    def acceptance_histogram(self) -> Counter[int]:
        """Accepted draft tokens -> number of steps."""
        return sum(self.acceptance_histogram_by_draft_length.values(), Counter[int]())

    @property
    def num_spec_steps(self) -> int:
        return self.acceptance_histogram.total()

    @property
    def num_draft_tokens(self) -> int:
        return sum(d * counts.total() for d, counts in self.acceptance_histogram_by_draft_length.items())

    @property
    def num_accepted_draft_tokens(self) -> int:
        return sum(a * n for a, n in self.acceptance_histogram.items())

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step with the bonus token: 1 + accepted / steps; 1 for plain decoding."""
        steps = self.num_spec_steps
        return 1 + self.num_accepted_draft_tokens / steps if steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        drafted = self.num_draft_tokens
        return self.num_accepted_draft_tokens / drafted if drafted else 0.0

    def acceptance_by_position(self) -> list[tuple[float, float]]:
        """(joint, conditional) acceptance of draft positions 1, 2, ..., up to the last that any step reached.

        Joint: steps that accepted at least i, over steps that drafted at least i. Conditional: over steps that reached
        i, which drafted as much and accepted all before it.
        """
        rates = []
        for i in range(1, max(self.acceptance_histogram_by_draft_length, default=0) + 1):
            deep = [counts for d, counts in self.acceptance_histogram_by_draft_length.items() if d >= i]
            tried = sum(counts.total() for counts in deep)
            reached = sum(n for counts in deep for a, n in counts.items() if a >= i - 1)
            if not reached:
                break
            kept = sum(n for counts in deep for a, n in counts.items() if a >= i)
            rates.append((kept / tried, kept / reached))
        return rates

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "num_generated_tokens": self.num_generated_tokens,
            "num_spec_steps": self.num_spec_steps,
            "num_plain_steps": self.num_plain_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": {str(k): n for k, n in sorted(self.acceptance_histogram.items())},
            "acceptance_by_position": [
                {"joint": joint, "conditional": conditional} for joint, conditional in self.acceptance_by_position()
            ],
        }


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
        tool_calls: calls of tools in OpenAI's words, as `LLM.chat` finds them; `text` is then what precedes them.
        problem: what its own processor, criterion or grammar raised, where that ended it.
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
    tool_calls: list[dict[str, Any]] | None = None
    problem: BaseException | None = None


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
class RequestState:
    """A request that has not ended, and its outputs that have."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    n: int
    finished: dict[int, CompletionOutput] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        """A `RequestOutput` of the request that holds `outputs`."""
        is_finished = len(self.finished) == self.n
        head = self.request_id, self.prompt, self.prompt_token_ids
        return RequestOutput(*head, outputs, is_finished, self.prompt_logprobs)


class RequestOutputs:
    """Turns an engine's rounds into outputs.

    Args:
        tokenizer: turns tokens of `logprobs` into text; None: there is none.
        final_only: make outputs of requests that have ended, whole, in place of what rounds added.
    """

    def __init__(self, tokenizer: Any, final_only: bool) -> None:
        self._tokenizer, self._final_only = tokenizer, final_only
        self._states: dict[str, RequestState] = {}
        self._unreported: list[RequestOutput] = []

    def __contains__(self, request_id: str) -> bool:
        """Whether a request has not ended."""
        return request_id in self._states

    @property
    def has_unreported(self) -> bool:
        """Whether outputs were made that nobody took."""
        return bool(self._unreported)

    def add(self, request_id: str, prompt: str | None, requests: list[Request]) -> None:
        """Expect the outputs of a request."""
        ids = requests[0].prompt_token_ids
        self._states[request_id] = RequestState(request_id, prompt, ids, len(requests))

    def remove(self, request_id: str) -> None:
        """Expect nothing of a request any more."""
        del self._states[request_id]

    def collect(self, rounds: list[RoundOutput]) -> None:
        """Make outputs of what rounds added; nothing of a round that added nothing to a sequence."""
        for round_ in rounds:
            for row in round_.rows:
                if row.finish_reason is not None or (row.token_ids and not self._final_only):
                    self._collect(row)

    def take(self) -> list[RequestOutput]:
        """The outputs that were made since the last call."""
        made, self._unreported = self._unreported, []
        return made

    def _collect(self, row: RowRound) -> None:
        sequence = row.sequence
        state = self._states[sequence.request_id]
        output = self._output(row)
        if row.finish_reason is not None:
            state.finished[sequence.index] = output
            if sequence.request.params.prompt_logprobs is not None:  # the first of them reads the prompt for all
                state.prompt_logprobs = [None, *(self._logprobs(sequence.prompt_logprobs) or ())]
            if len(state.finished) == state.n:
                del self._states[state.request_id]
        if not self._final_only:
            self._unreported.append(state.output([output]))
        elif len(state.finished) == state.n:
            self._unreported.append(state.output([state.finished[index] for index in range(state.n)]))

    def _output(self, row: RowRound) -> CompletionOutput:
        """What a round added to a sequence, or with `final_only` all of it."""
        sequence, is_whole = row.sequence, self._final_only
        tokens = sequence.completion_token_ids if is_whole else row.token_ids
        given = None if sequence.request.params.logprobs is None else sequence.logprobs if is_whole else row.logprobs
        logprobs = self._logprobs(given)
        total = None
        if logprobs is not None:
            total = sum(by_token[token].logprob for token, by_token in zip(tokens, logprobs, strict=True))
        if row.finish_reason is None:
            return CompletionOutput(sequence.index, str(row.text), tokens, logprobs=logprobs, cumulative_logprob=total)
        stop_reason = None
        if row.finish_reason == "stop":
            stop_reason = sequence.stopper.stop_reason(sequence.completion_token_ids)
        return CompletionOutput(
            sequence.index,
            sequence.stopper.text if is_whole else str(row.text),
            tokens,
            row.finish_reason,
            stop_reason,
            logprobs,
            total,
            sequence.stats,
            sequence.num_found,
            problem=row.problem,
        )

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
