"""What callers set: `SamplingParams`, how a request is continued, and `SpeculativeConfig`, how drafts are made."""

from __future__ import annotations

import math
import re
from collections import abc
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from selfspec.errors import flag, got, is_number, whole
from selfspec.structured.outputs import StructuredOutputs

if TYPE_CHECKING:  # for annotations alone
    from pathlib import Path

    from transformers import GenerationConfig

    from selfspec.control.plan import Policy
    from selfspec.drafting.datastore import Datastore
    from selfspec.learn import Learner

LogitsProcessor = Callable[[Any, Any], Any]  # (token ids [1, length], logits [1, vocab]) -> logits [1, vocab]
DRAFTERS = ("exit", "lookup", "copies")
MAX_LOGPROBS = 20
MAX_BIAS = 100
MAX_NGRAM = 1 << 16
MIN_TEMPERATURE = 1e-6
STATEFUL = re.compile(r"(xgrammar|outlines|outlines_core|llguidance)\.|.*ClassifierFreeGuidance")  # processors
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: 0 <= x < math.inf, "a number of at least 0 (0 is greedy)"),
    "top_p": (lambda x: 0 < x <= 1, "a number in (0, 1] (1 keeps all tokens)"),
    "min_p": (lambda x: 0 <= x <= 1, "a number in [0, 1] (0 keeps all tokens)"),
    "repetition_penalty": (lambda x: 0 < x < math.inf, "a number above 0 (1 changes nothing)"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "a number in [-2, 2] (0 changes nothing)"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "a number in [-2, 2] (0 changes nothing)"),
}
COUNTS = {"max_tokens": (1, None), "top_k": (0, None), "no_repeat_ngram_size": (0, MAX_NGRAM), "n": (1, None)}
COUNTS |= {"min_tokens": (0, None), "logprobs": (0, MAX_LOGPROBS), "prompt_logprobs": (0, MAX_LOGPROBS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request is continued. Names are those of vLLM.

    None takes the value from the model's generation config, as transformers' `generate` does, and else the one below.

    Args:
        max_tokens: most new tokens; 128.
        temperature: 0, greedy.
        top_p: keep the smallest set of likeliest tokens with this probability, in (0, 1]; 1.
        top_k: keep the k likeliest tokens; 0 keeps all.
        min_p: keep tokens at least this likely relative to the likeliest, in [0, 1]; 0.
        seed: of the noise that sampling adds. The output depends on prompt, parameters and seed alone.
        stop: texts that end the output; they are not part of it.
        stop_token_ids: further tokens that end the output; they are part of `token_ids`.
        include_stop_str_in_output: the text that ended the output is part of it.
        ignore_eos: write on after an end-of-text token.
        min_tokens: no end-of-text or stop token, and no text of `stop`, ends the output before so many new tokens; at
            most `max_tokens`, if that is given.
        skip_special_tokens: leave special tokens, such as an end of text, out of the text.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in prompt or output; 1.
        presence_penalty: is subtracted from the logits of tokens in the output, in [-2, 2]; 0.
        frequency_penalty: the same, once for every time that a token is there; 0.
        no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and output; 0 allows all.
        logit_bias: by token id, what is added to its logit, in [-100, 100], after penalties and before filters.
        logprobs: return the log-probability of every new token, and of this many of the likeliest; at most 20.
        prompt_logprobs: the same of every prompt token but the first, in `RequestOutput.prompt_logprobs`.
        n: outputs per prompt. Output i has the seed `seed + i`.
        logits_processors: functions of the prefix, as transformers' are: `(token ids [1, length], logits [1, vocab])`
            to logits. They must be pure, since drafts ask them about prefixes that the output may not have; or have a
            method `copy`, and be called once per position in order: copies are then asked about drafts. Those with a
            method `rollback` alone are copied by `copy.deepcopy`. Transformers' SynthID is copied, too; others that
            are known to have a state are refused.
        structured_outputs: what the output must look like; masks come after penalties and processors.
        prediction: what much of the output is expected to be, such as a file that is to be edited: a text, or token
            ids. Drafts by lookup are taken from it, too; the output is the same whatever it is.
        speculative: False: no token of this request is drafted. The output is the same.
        generation_config: its values win over those of the model's own, value by value; False: take nothing but
            end-of-text tokens from the model's.

    Raises:
        ValueError: a parameter out of range. What depends on the model is checked when a request is made.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int = 0
    stop: str | abc.Sequence[str] | None = None
    stop_token_ids: abc.Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: abc.Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    logits_processors: abc.Sequence[LogitsProcessor] | LogitsProcessor | None = None
    structured_outputs: StructuredOutputs | None = None
    prediction: str | abc.Sequence[int] | None = None
    speculative: bool = True
    generation_config: GenerationConfig | Literal[False] | None = None

    def __post_init__(self) -> None:
        for name, (is_in_range, allowed) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not (is_number(value) and is_in_range(value)):
                raise ValueError(f"{name} must be {allowed}, {got(value)}")
        if self.temperature and self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, below which logits overflow, "
                f"got {self.temperature}"
            )
        for name, (least, most) in COUNTS.items():
            value = getattr(self, name)
            if value is not None and whole(name, value, least) > (math.inf if most is None else most):
                raise ValueError(f"{name} must be at most {most}, got {value}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, {self.max_tokens}, got {self.min_tokens}")
        if not -(1 << 63) <= whole("seed", self.seed) < 1 << 63:
            raise ValueError(f"seed must be a 64-bit integer, got {self.seed}")
        for name in ("speculative", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            flag(name, getattr(self, name))
        for token, bias in (self.logit_bias or {}).items():
            whole("a token id of logit_bias", token, 0)
            if not (is_number(bias) and -MAX_BIAS <= bias <= MAX_BIAS):
                raise ValueError(f"logit_bias must be numbers in [-{MAX_BIAS}, {MAX_BIAS}] by token id, {got(bias)}")
        expected: Any = self.prediction
        if not (expected is None or isinstance(expected, str)):
            if not isinstance(expected, Collection):
                raise ValueError(f"prediction must be a text or a list of token ids, {got(expected)}")
            for token in expected:
                whole("a token id of prediction", token, 0)
        texts: Any = self.stops
        for text in texts:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty texts, {got(text)}")
        ends: Any = () if self.stop_token_ids is None else self.stop_token_ids
        if isinstance(ends, str) or not isinstance(ends, Collection):
            raise ValueError(f"stop_token_ids must be a list of token ids or None, {got(ends)}")
        for token in ends:
            whole("a token id of stop_token_ids", token, 0)
        for processor in self.processors:
            if not callable(processor):
                raise ValueError(f"logits_processors must be functions, {got(processor)}")
            kind = f"{type(processor).__module__}.{type(processor).__name__}"
            can_go_back = any(callable(getattr(processor, name, None)) for name in ("copy", "rollback"))
            if STATEFUL.match(kind) and not can_go_back:
                raise ValueError(
                    f"logits_processors must be pure functions of the prefix or have a method copy, got {kind}, which "
                    "has a state and no copy; add one, or leave it out"
                )
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise ValueError(
                f"structured_outputs must be a selfspec.StructuredOutputs or None, {got(self.structured_outputs)}"
            )

    @property
    def stops(self) -> tuple[str, ...]:
        given: Any = self.stop
        if given is None:
            return ()
        return tuple(given) if isinstance(given, Collection) and not isinstance(given, str) else (given,)

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        given: Any = self.logits_processors
        if given is None:
            return ()
        return tuple(given) if isinstance(given, Collection) and not callable(given) else (given,)

    def limited(self, max_tokens: int) -> SamplingParams:
        """The same with so many new tokens at most, which `min_tokens` gives way to."""
        return replace(self, max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))

    @property
    def is_greedy(self) -> bool:
        return not self.temperature

    @property
    def filters(self) -> tuple[float, int, float, float]:
        """Temperature, top-k, top-p and min-p; they apply in this order, after penalties and processors."""
        return (self.temperature or 0.0, self.top_k or 0, 1.0 if self.top_p is None else self.top_p, self.min_p or 0.0)

    @property
    def penalties(self) -> tuple[float, float, float, int]:
        """Repetition, presence and frequency penalty, and the size of n-grams that do not repeat."""
        repetition = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        return (repetition, self.presence_penalty or 0.0, self.frequency_penalty or 0.0, self.no_repeat_ngram_size or 0)

    @property
    def penalizes(self) -> bool:
        """Whether picks depend on which tokens the sequence holds."""
        return self.penalties != (1.0, 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made. It changes speed and never a token.

    Args:
        policy: a name among `selfspec.control.registry.POLICIES`, or a `selfspec.Policy`; default: `adaptive`, which
            learns what pays and needs no settings, or `fixed` where one of the next two is given.
        exit_layer: layers that draft, 1..num_layers - 1.
        num_speculative_tokens: tokens drafted per round.
        drafters: where `adaptive` may take drafts from, some of "exit" (early layers), "lookup" (what
            followed earlier in the text, in finished responses or in a corpus), "copies" (4-bit copies of early layers
            in their place); default: all.
        corpus: a file that `selfspec corpus build` wrote, or an open `selfspec.Datastore`, for lookup.
        reuse_responses: look drafts up in the responses that this LLM finished before, too, 200,000 tokens of them, the
            least recently used out first; those of requests with `speculative=False` are among them. Tokens never
            change, but the speed of a request can tell that a similar text was written before: turn it off where
            requests must not learn of each other.
        learn: train exit heads on finished answers meanwhile; True, or a `selfspec.learn.Learner` of this model.

    Raises:
        ValueError: an unknown drafter, or a number out of range. The policy is checked when an `LLM` takes it.
    """

    policy: str | Policy | None = None
    exit_layer: int | None = None
    num_speculative_tokens: int | None = None
    drafters: abc.Sequence[str] | None = None
    corpus: str | Path | Datastore | None = None
    reuse_responses: bool = True
    learn: bool | Learner = False

    def __post_init__(self) -> None:
        for name, least in (("exit_layer", 1), ("num_speculative_tokens", 0)):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), least)
        drafters: Any = self.drafters
        are_several = isinstance(drafters, Collection) and not isinstance(drafters, str)
        if drafters is not None and not (are_several and drafters and all(one in DRAFTERS for one in drafters)):
            raise ValueError(f"drafters must be some of {', '.join(DRAFTERS)}, {got(drafters)}")
        is_fixed = self.exit_layer is not None or self.num_speculative_tokens is not None
        if drafters is not None and self.policy != "adaptive" and not (self.policy is None and not is_fixed):
            raise ValueError(
                "drafters are those of the policy adaptive, got another policy, or fixed by exit_layer or "
                "num_speculative_tokens alone; add policy='adaptive', or leave drafters out"
            )
        flag("reuse_responses", self.reuse_responses)
