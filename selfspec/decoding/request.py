"""`Request`, what a caller asks for, and `Completion`, what they get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

from torch import Tensor
from transformers import GenerationConfig

from selfspec.decoding.stats import SpecStats
from selfspec.decoding.stopping import Criterion, FinishReason
from selfspec.errors import flag, refuse_empty, whole
from selfspec.executors.logprobs import MOST_LOGPROBS, TokenLogprobs
from selfspec.executors.pick import Sampling

Processor = Callable[[Any, Tensor], Tensor]  # (token ids [1, length], logits [1, vocab]) -> logits [1, vocab]
DEFAULT_NEW_TOKENS = 128
PER_PROMPT = ("seed", "max_new_tokens")  # options that may be one per prompt
Prompts = str | Sequence[str] | Sequence[Sequence[int]]


class Options(TypedDict, total=False):
    """How to continue prompts, shared by a call's rows; `seed` and `max_new_tokens` may also be one per prompt."""

    max_new_tokens: int | Sequence[int | None]  # default 128; None in a list is the default, too
    temperature: float  # default 0: greedy
    top_k: int  # default 0: all tokens
    top_p: float  # default 1: all tokens
    min_p: float  # default 0: all tokens
    repetition_penalty: float  # default 1; this and the next three: see `Sampling`
    presence_penalty: float  # default 0
    frequency_penalty: float  # default 0
    no_repeat_ngram_size: int  # default 0
    seed: int | Sequence[int]  # default 0; a row's output depends on its prompt and its own seed alone
    stop: str | Sequence[str] | None  # texts that end the output; they are not part of it
    stop_token_ids: Sequence[int] | None  # more tokens that end the output; they are part of it
    ignore_eos: bool  # default False; whether the output goes on after an end-of-text token
    logits_processor: Processor | Sequence[Processor] | None
    stopping_criteria: Criterion | Sequence[Criterion] | None
    keep_logits: bool  # default False; see `Request`
    logprobs: int | None  # default None; see `Request`
    prompt_logprobs: int | None  # likewise
    speculative: bool  # default True; see `Request`
    generation_config: GenerationConfig | Literal[False] | None
    """What is not named here is taken from the model's own generation config, as transformers' `generate` takes it:
    lengths, stop strings, penalties and other processors, and with `do_sample` temperature and filters. One that is
    given wins over the model's own, value by value; False: take nothing (but end-of-text tokens) from the model's."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it.

    Args:
        logits_processor: pure functions of the prefix, as transformers' are; asked once per position, with its own
            prefix, after penalties.
        stopping_criteria: asked after every kept token, with `input_ids [1, length]`; the scores argument is None.
        keep_logits: keep every new token's logits `[vocab]` in `Completion.logits`, before processors, and in
            `Completion.scores`, after penalties, processors and filters.
        stop_token_ids: tokens that end the output beside those of `eos`; the finish reason is then "stop".
        ignore_eos: no token of `eos` ends the output.
        logprobs: 0..20: tell every new token's log-probability and those of so many likeliest tokens, from the logits
            before penalties, processors, temperature and filters, in `Completion.logprobs`; None: tell of none.
        speculative: whether its tokens may be drafted.
        prompt_logprobs: 0..20: the same of every prompt token but the first, in `Completion.prompt_logprobs`; the whole
            prompt is then read, whatever the cache holds of it.
    """

    prompt: Sequence[int]
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    eos: frozenset[int] | None = None  # None: the model's own
    logits_processor: Sequence[Processor] = ()
    stopping_criteria: Sequence[Criterion] = ()
    keep_logits: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculative: bool = True
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise ValueError("prompt is empty; give at least one token to continue")
        whole("max_new_tokens", self.max_new_tokens, least=1)
        refuse_empty("stop", self.stop)
        for token in self.stop_token_ids:
            whole("a token id of stop_token_ids", token, least=0)
        flag("ignore_eos", self.ignore_eos)
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(self, name)
            if number is not None and whole(name, number, least=0) > MOST_LOGPROBS:
                raise ValueError(f"{name} must be at most {MOST_LOGPROBS} likeliest tokens, got {number}")
        for name in ("logits_processor", "stopping_criteria"):
            for one in getattr(self, name):
                if not callable(one):
                    raise ValueError(f"{name} must be a function or a list of functions, got {one!r}")
        flag("speculative", self.speculative)

    def with_seed(self, seed: int) -> Request:
        """The same with other noise."""
        return replace(self, sampling=replace(self.sampling, seed=seed))


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. `tokens` hold the end-of-text token if there is one; `text` holds no stop string."""

    request_id: int
    tokens: list[int]
    text: str
    finish_reason: FinishReason  # "eos", "stop" (a stop string, stop token or criterion), "length", "cancelled"
    stats: SpecStats
    seed: int
    logits: list[Tensor] | None = None
    scores: list[Tensor] | None = None
    logprobs: list[TokenLogprobs] | None = None  # of every token, where asked
    stop_reason: int | str | None = None  # the stop token or stop string that ended it, if one did
    num_cached_tokens: int = 0  # of the prompt, that an engine with a prefix cache did not have to read
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's tokens but the first, where asked


def make_request(
    prompt: str | Sequence[int],
    tokenizer: Any = None,
    *,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    no_repeat_ngram_size: int = 0,
    seed: int = 0,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    ignore_eos: bool = False,
    logits_processor: Processor | Sequence[Processor] | None = None,
    stopping_criteria: Criterion | Sequence[Criterion] | None = None,
    keep_logits: bool = False,
    logprobs: int | None = None,
    speculative: bool = True,
    prompt_logprobs: int | None = None,
) -> Request:
    """A request from a text or token ids and its `Options`, checked.

    Raises:
        ValueError: an empty prompt, an option out of range, or text without a tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                "prompt is text but the target has no tokenizer; pass token ids, or load with tokenizer=..."
            )
        ids = [int(i) for i in tokenizer(prompt)["input_ids"]]
    else:
        ids = [whole("a prompt's token id", i) for i in prompt]
    stops = tuple(stop or ()) if isinstance(stop, list | tuple | None) else (stop,)
    penalties = repetition_penalty, presence_penalty, frequency_penalty, no_repeat_ngram_size
    sampling = Sampling(temperature, top_k, top_p, min_p, seed, *penalties)
    ends: Any = () if stop_token_ids is None else stop_token_ids
    if isinstance(ends, str) or not hasattr(ends, "__iter__"):
        raise ValueError(f"stop_token_ids must be a list of token ids or None, got {stop_token_ids!r}")
    return Request(
        ids,
        max_new_tokens,
        sampling,
        stops,
        logits_processor=_several(logits_processor),
        stopping_criteria=_several(stopping_criteria),
        keep_logits=keep_logits,
        stop_token_ids=tuple(ends),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        speculative=speculative,
        prompt_logprobs=prompt_logprobs,
    )


def make_requests(prompts: Prompts, tokenizer: Any, options: Mapping[str, Any]) -> list[Request]:
    """A request per prompt, from the `Options` of them all.

    Raises:
        ValueError: what `make_request` refuses, or what are no prompts, or not one seed or length for each.
    """
    given: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # a tensor or array of token ids
    several: Any = [given] if isinstance(given, str) else given
    if not isinstance(several, Sequence) or not all(hasattr(prompt, "__iter__") for prompt in several):
        kind = f"a {type(prompts).__name__}"
        if isinstance(several, Sequence):
            others = [
                type(one).__name__ for one in several if not hasattr(one, "__iter__") and not isinstance(one, int)
            ]
            kind = f"a list that holds a {others[0]}" if others else "one list of ids"
        raise ValueError(f"prompts must be a text, a list of texts or a list of token-id lists, got {kind}")
    shared = {name: value for name, value in options.items() if name != "generation_config"}  # see `Stored.complete`
    own = {name: value for name in PER_PROMPT if isinstance(value := options.get(name), Sequence)}
    for name, values in own.items():
        if len(values) != len(several):
            raise ValueError(f"{name} must be one number or one per prompt ({len(several)}), got {len(values)}")
    shared = {name: value for name, value in shared.items() if name not in own}
    return [
        make_request(prompt, tokenizer, **shared, **{name: one[i] for name, one in own.items() if one[i] is not None})
        for i, prompt in enumerate(several)
    ]


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)
