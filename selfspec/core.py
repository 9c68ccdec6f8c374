"""The nouns of selfspec: what is asked for, what is decoded, what is planned, and what came of it.

No torch, and no import of another part: every part imports them from here. The engine's step in these words: a policy
makes a `Plan` for the running sequences, an executor runs it and returns `RoundOutput`s, and the policy observes them.
"""

from __future__ import annotations

import json
import math
import re
from collections import abc
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from selfspec.errors import flag, got, is_number, refuse_empty, whole

if TYPE_CHECKING:  # for annotations alone
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import GenerationConfig

    from selfspec.control.ledger import Ledger
    from selfspec.control.plan import Alternatives, LookupTable, Policy, ShadowPlan, SurvivalStop
    from selfspec.decoding.outputs import SpecStats
    from selfspec.decoding.stopping import Stopper, TextDelta
    from selfspec.drafting.datastore import Datastore
    from selfspec.drafting.lookup import RowLookup
    from selfspec.executors.logprobs import TokenLogprobs
    from selfspec.learn import Learner
    from selfspec.structured.row_grammar import RowGrammar

FinishReason = Literal["stop", "length", "abort"]
LogitsProcessor = Callable[[Any, Any], Any]  # (token ids [1, length], logits [1, vocab]) -> logits [1, vocab]
StoppingCriterion = Callable[[Any, Any], Any]  # (token ids [1, length], None) -> whether the output ends here
DRAFTERS = ("exit", "lookup", "copies")
COMBINING = {"$ref", "allOf", "anyOf", "oneOf"}  # keywords of schemas
OPENING = COMBINING | {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
DEFAULT_MAX_TOKENS = 128
MAX_LOGPROBS = 20
MAX_BIAS = 100
MAX_NGRAM = 1 << 16
MIN_TEMPERATURE = 1e-6
STATEFUL = re.compile(r"(xgrammar|outlines|outlines_core|llguidance)\.|.*ClassifierFreeGuidance")  # processors
MAX_SCHEMA, MAX_EXPRESSION = 1 << 18, 1 << 15  # characters of a schema or choices; of expressions and grammars
LOOKUP = 0  # the exit layer of drafts by lookup: no layer drafts, all layers verify
UNBOUNDED_ROUNDS = 1 << 30  # `num_rounds` of a plan that never changes
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
class StructuredOutputs:
    """What an output must look like: one of the first five. Names are those of vLLM.

    The output ends where nothing may follow. Where it may end and may go on, an end-of-text token ends it.

    Args:
        json: a JSON schema, as a mapping or a text; the output is JSON that validates, without properties that the
            outermost object does not name, unless `additionalProperties` says so.
        json_object: True: the output is a JSON object.
        regex: a regular expression that the whole output matches, in the syntax of Rust's crate regex.
        choice: the output is one of these texts.
        grammar: a context-free grammar in the syntax of Lark or of GBNF.
        disable_any_whitespace: JSON without spaces and line breaks between its parts.

    Raises:
        ValueError: none or several of the five, a value of another kind, or one of more than `MAX_SCHEMA` or
            `MAX_EXPRESSION` characters. What a grammar says is checked when a request is made.
    """

    json: str | abc.Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: abc.Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        flag("disable_any_whitespace", self.disable_any_whitespace)
        names = ("json", "json_object", "regex", "choice", "grammar")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have one of {', '.join(names)}, got {' and '.join(given) or 'none'}"
            )
        kind, text = self.source
        most = MAX_EXPRESSION if kind in ("regex", "grammar") else MAX_SCHEMA
        if len(text) > most:
            raise ValueError(f"structured_outputs.{given[0]} must have at most {most} characters, got {len(text)}")
        if kind == "json" and (length := _pattern_length(json.loads(text))) > MAX_EXPRESSION:
            raise ValueError(
                f"structured_outputs.json must have patterns of at most {MAX_EXPRESSION} characters, got {length}"
            )

    def refusal(self, reason: str) -> str:
        """A sentence that says why it cannot be honoured."""
        return f"structured_outputs.{self.source[0]} is refused by llguidance: {reason}"

    @property
    def source(self) -> tuple[str, str]:
        """How it is written, "json", "regex", "choice" or "grammar", and the text; choices are a terminal of Lark."""
        if self.json_object:
            flag("structured_outputs.json_object", self.json_object)
            return "json", '{"type": "object"}'
        if self.json is not None:
            return "json", _schema_text(self.json)
        for name in ("regex", "grammar"):
            text: Any = getattr(self, name)
            if text is not None:
                if not isinstance(text, str):
                    raise ValueError(f"structured_outputs.{name} must be a text, {got(text)}")
                return name, text
        choices: Any = self.choice
        if isinstance(choices, str) or not isinstance(choices, Collection) or not choices:
            raise ValueError(f"structured_outputs.choice must be a list of texts, {got(choices)}")
        refuse_empty("structured_outputs.choice", choices)
        return "choice", f"start: CHOICE\nCHOICE: {' | '.join(map(_json, choices))}"  # a terminal may have many


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _schema_text(schema: Any) -> str:
    """A JSON schema as a text.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        if isinstance(schema, str) and len(schema) <= MAX_SCHEMA:
            schema = json.loads(schema)
        text = schema if isinstance(schema, str) else _json(closed(schema))
    except (ValueError, TypeError, RecursionError) as problem:
        raise ValueError(f"structured_outputs.json must be a JSON schema, and it is no JSON ({problem})") from problem
    if not isinstance(schema, str | abc.Mapping):
        raise ValueError(f"structured_outputs.json must be a JSON schema, a mapping or its text, {got(schema)}")
    return text


def closed(schema: Any) -> Any:
    """An object's schema without properties that it does not name, unless it says or needs them.

    What it allows validates against the schema as it is. A small model would write further properties without end.
    """
    if not isinstance(schema, abc.Mapping) or schema.keys() & OPENING:
        return schema
    named, needed = schema.get("properties"), schema.get("required", ())
    if (
        not isinstance(named, abc.Mapping)
        or not isinstance(needed, list | tuple)
        or not {*map(str, needed)} <= named.keys()
    ):
        return schema
    return {**schema, "additionalProperties": False}


def _pattern_length(schema: Any) -> int:
    """Characters of all regular expressions in a schema."""
    found, rest = 0, [schema]
    while rest:
        one = rest.pop()
        if isinstance(one, list):
            rest += one
        elif isinstance(one, dict):
            pattern, named = one.get("pattern"), one.get("patternProperties")
            found += len(pattern) if isinstance(pattern, str) else 0
            found += sum(map(len, named)) if isinstance(named, dict) else 0
            rest += one.values()
    return found


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
        min_tokens: no end-of-text or stop token, and no text of `stop`, ends the output before so many new tokens.
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


@dataclass(frozen=True, slots=True)
class Request:
    """One output to decode: a prompt's tokens and how they are continued, completed by the model's defaults.

    Args:
        eos_token_ids: tokens that end the text.
        stopping_criteria: asked after every kept token.
        keep_logits: keep every new token's logits `[vocab]`, before processors, and scores, after filters.
        reserve: new tokens that pages are taken for at a time; None: for `max_tokens`, when it joins the batch.

    Raises:
        ValueError: an empty prompt.
    """

    prompt_token_ids: list[int]
    params: SamplingParams = SamplingParams()
    eos_token_ids: frozenset[int] = frozenset()
    stopping_criteria: tuple[StoppingCriterion, ...] = ()
    keep_logits: bool = False
    reserve: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ValueError("prompt is empty; give at least one token to continue")

    @property
    def max_tokens(self) -> int:
        return self.params.max_tokens or DEFAULT_MAX_TOKENS


@dataclass(slots=True, eq=False)
class Sequence:
    """One output being decoded. Keys and values of its first `num_cached` tokens are valid: all but the last token."""

    seq_id: int
    request: Request
    token_ids: list[int]  # prompt and output
    max_length: int  # tokens of prompt and output
    num_reserved: int = field(default=0, kw_only=True)  # tokens that its pages are taken for; 0: `max_length`
    request_id: str = ""
    index: int = 0  # which of the request's `n` outputs
    stopper: Stopper = None  # type: ignore[assignment]  # set by the scheduler
    grammar: RowGrammar | None = None  # of structured outputs
    pages: tuple[int, ...] = ()  # its KV pages, in order
    num_cached: int = 0
    num_found: int = 0  # prompt tokens whose keys and values were in the prefix cache
    finish_reason: FinishReason | None = None
    stats: SpecStats = None  # type: ignore[assignment]  # set by the scheduler
    logits: list[Tensor] = field(default_factory=list)  # of its new tokens, where the request keeps them
    scores: list[Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its new tokens, where asked
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's tokens but the first
    blocks: list[Any] = field(default_factory=list)  # its first pages, which other sequences may read
    num_edits: int | None = None  # of weights in place, before it joined; None: no prefix cache
    processors: dict[tuple[int, ...], list[LogitsProcessor]] = field(default_factory=dict)  # copies, by output so far
    has_pages: bool = False  # they are given back once
    problem: BaseException | None = (
        None  # of its processor, criterion or grammar, or an interrupt: the engine aborts it
    )
    new_lookup: Callable[[abc.Sequence[int]], RowLookup] | None = None  # of its tokens; None: no lookup
    _lookup: RowLookup | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_remaining(self) -> int:
        """Tokens that it may still emit."""
        return min(self.max_length, self.num_reserved or self.max_length) - len(self.token_ids)

    @property
    def lookup(self) -> RowLookup:
        """Drafts by lookup, and how often they would have been right. Its index is built at the first use."""
        if self._lookup is None:
            assert self.new_lookup is not None
            self._lookup = self.new_lookup(self.token_ids)
        return self._lookup

    @property
    def identity(self) -> tuple[int, int]:
        """Constant while the sequence lives, and different from other sequences."""
        return self.seq_id, self.max_length

    @property
    def is_prefilled(self) -> bool:
        return self.num_cached == len(self.token_ids) - 1

    @property
    def has_processors(self) -> bool:
        return bool(self.request.params.logits_processors)

    @property
    def needs_vocabulary(self) -> bool:
        """Whether drafts are over the whole vocabulary: a part of it may hold no token that is allowed."""
        return self.has_processors or self.grammar is not None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, row: RowRound) -> None:
        """Take a round's tokens; keys and values beyond them are left to be overwritten."""
        self.token_ids += row.token_ids
        self.num_cached = len(self.token_ids) - 1
        self.logprobs += row.logprobs or []
        if row.logits is not None and row.scores is not None:
            self.logits += row.logits[: len(row.token_ids)]
            self.scores += row.scores[: len(row.token_ids)]

    def blame(self) -> _Blame:
        """A context in which what is raised is this request's fault: its own code runs there."""
        return _Blame(self)


class _Blame(NamedTuple):
    sequence: Sequence

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        self.sequence.problem = self.sequence.problem or problem


class Draft(NamedTuple):
    """What a drafter proposes for one sequence without running layers."""

    token_ids: list[int]
    match_length: int = 0  # of the text that it continues; of forced tokens, their number
    source: int = 0  # one of `control.plan.SOURCES`, or `control.plan.GRAMMAR`


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: up to `num_rounds` rounds of a batch, each with one draft and one verification.

    A plan ends early when a sequence ends, when its deadline has passed, and after the round with shadow picks. At
    least one round runs.

    Both stop rules (`min_confidence`, `stop`) end a row's draft after a token. They never withdraw that token, which
    would bias sampled output. Recorded rounds (CUDA) have neither stop rules nor `alternatives`.

    Args:
        exit_layer: number of layers that draft. None: plain decoding. 0 (`LOOKUP`): every row drafts the tokens that
            followed the latest earlier occurrence of its last tokens, and all layers verify.
        draft_lengths: maximum tokens to draft per row; cut to the tokens that the row may still emit.
    """

    exit_layer: int | None
    draft_lengths: tuple[int, ...]
    min_confidence: float = 0.0  # a row stops after a drafted token of lower probability; excludes `stop`
    stop: SurvivalStop | None = None
    keep_confidence: bool = False  # report confidences of drafted tokens even where no stop rule needs them
    keep_divergence: bool = False  # report KL(target || draft) at the judged positions
    shadow: ShadowPlan | None = None  # a probe after the first round that is not drafted by lookup
    alternatives: Alternatives | None = None  # second choices, drafted on branches
    draft_vocab: int | None = None  # draft over the N most frequent tokens; not with processors and grammars
    draft_bits: int | None = None  # 4: draft by 4-bit copies of the layers, where they exist; all layers verify
    lookups: LookupTable | None = None  # draft by lookup in the rounds for which the table gives lengths
    most_forced: int = 0  # tokens that a row's grammar forces are drafted first, at most so many per round
    ledger: Ledger | None = None  # what drafts may lose; None: no limit
    num_rounds: int = 1
    deadline: float | None = None  # seconds after which no further round begins; None: the engine's
    speedup: float | None = None  # expected speedup over plain decoding, for display

    @property
    def reads_confidence(self) -> bool:
        """Whether confidences of drafted tokens are computed."""
        wants = self.keep_confidence or self.min_confidence > 0 or self.stop or self.alternatives
        return bool(wants) and self.exit_layer != LOOKUP


class ShadowPicks(NamedTuple):
    """What layers that did not draft would have picked at judged positions, compared with the target's picks."""

    layers: tuple[int, ...]
    hits: NDArray[np.bool_]  # [layers, judged positions in order]: equal to the target's pick
    confidences: NDArray[np.float32]  # the same shape: probability of the shadow pick under its layer


@dataclass(slots=True)
class RowRound:
    """What one sequence got out of one round. The executor makes it; the engine cuts it where the sequence ends."""

    sequence: Sequence
    num_drafted: int  # tokens of its draft, without branches; beyond the sequence's end none counts
    num_accepted: int  # drafted tokens among `token_ids`
    token_ids: list[int]  # new tokens: accepted drafts, then the target's own pick
    drafted: list[int] = field(default_factory=list)  # the draft; of a tree, the branch that the output followed
    confidences: tuple[float, ...] = ()  # of the drafted tokens, where the plan reads them
    divergences: tuple[float, ...] = ()  # KL(target || draft) in nats at the judged positions, where the plan asks
    shadow: ShadowPicks | None = None
    match_length: int = 0  # of a draft by lookup; of forced tokens, their number
    source: int = 0  # of such a draft: one of `control.plan.SOURCES`, or `control.plan.GRAMMAR`
    logprobs: list[TokenLogprobs] | None = None  # of `token_ids`, where the request asks for them
    logits: Tensor | None = None  # [len(token_ids), vocab], where the request keeps them
    scores: Tensor | None = None
    alternative: bool | None = None  # whether the alternative at the first rejection was accepted; None: none there
    num_branch_tokens: int = 0  # drafted on other branches than `drafted`
    is_outside_vocab: bool = False  # the draft's vocabulary lacks the target's pick at the first rejection
    text: str | TextDelta = ""  # what became certain of the text
    finish_reason: FinishReason | None = None  # if the sequence ended in this round
    problem: BaseException | None = None  # that ended it

    @property
    def seq_id(self) -> int:
        return self.sequence.seq_id

    def cut(self, num_kept: int) -> None:
        """Keep the first tokens, where the sequence ends; drafted tokens beyond its end were not judged."""
        if num_kept < len(self.token_ids):
            self.token_ids = self.token_ids[:num_kept]
            self.logprobs = None if self.logprobs is None else self.logprobs[:num_kept]
        if num_kept < self.num_accepted:
            self.num_drafted = min(self.num_chain_accepted, num_kept)
            self.num_accepted, self.alternative, self.is_outside_vocab = num_kept, None, False
            self.confidences = self.confidences[: self.num_drafted]
            self.divergences = self.divergences[: self.num_drafted]

    @property
    def num_chain_accepted(self) -> int:
        """Accepted tokens of the draft without its branches."""
        return self.num_accepted - bool(self.alternative)

    @property
    def num_emitted(self) -> int:
        """Emitted tokens, the bonus token included, which a sequence may lack that has ended."""
        return self.num_accepted + 1

    @property
    def num_judged(self) -> int:
        """Judged tokens of the draft without its branches: the accepted ones, and the first rejected one."""
        return min(self.num_chain_accepted + 1, self.num_drafted)


@dataclass(slots=True)
class StageSeconds:
    """Wall time of a round by stage, in seconds. On CUDA, stages are not synchronised: it is the time of launching."""

    prefill: float = 0.0
    draft: float = 0.0  # early layers
    verify: float = 0.0  # remaining layers (all layers when nothing is drafted)
    head: float = 0.0  # final norm and vocabulary product
    pick: float = 0.0  # processors, filters, noise, argmax, and the copy to the host
    shadow: float = 0.0  # shadow picks
    control: float = 0.0  # plans and statistics
    rest: float = 0.0  # acceptance, stop strings, text, and overhead of compiled calls
    _last: float = field(default_factory=perf_counter, repr=False)

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to this stage."""
        now = self.now()
        self.add(stage, now - self._last)
        self._last = now

    def restart(self) -> None:
        """Start a new lap without adding the time since the last one."""
        self._last = self.now()

    def add(self, stage: str, seconds: float) -> None:
        setattr(self, stage, getattr(self, stage) + seconds)

    def now(self) -> float:
        return perf_counter()

    @property
    def decoding(self) -> float:
        """Seconds that drafting changes: all stages but prefill, shadow picks and control."""
        return self.draft + self.verify + self.head + self.pick + self.rest

    @property
    def total(self) -> float:
        stages = (self.prefill, self.draft, self.verify, self.head, self.pick, self.shadow, self.control, self.rest)
        return sum(stages)


@dataclass(slots=True)
class RoundOutput:
    """One round of a batch; sequences that only read their prompts are not in it."""

    exit_layer: int | None  # what drafted: a layer, `LOOKUP` (a grammar, too); None: nothing was drafted
    rows: list[RowRound]
    seconds: StageSeconds
    plan: Plan | None = None  # that it is a round of; None where no sequence was ready to decode
    round_index: int = 0  # its place among the rounds of its plan
    num_wasted: int = 0  # tokens that were decoded beyond the end of a sequence
