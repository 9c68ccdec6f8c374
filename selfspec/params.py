"""`SamplingParams`: how a request is continued; `SpeculativeConfig`: how its drafts are made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import GenerationConfig

from selfspec.control.plan import DRAFTS, Policy
from selfspec.control.registry import POLICIES
from selfspec.drafting.datastore import Datastore
from selfspec.errors import flag, got, whole
from selfspec.executors.pick import Sampling
from selfspec.learn import Learner

LogitsProcessor = Callable[[Any, Tensor], Tensor]  # (token ids [1, length], logits [1, vocab]) -> logits [1, vocab]
SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "logprobs", "prompt_logprobs", "speculative",
    "generation_config",
)  # fmt: skip
SAMPLING = tuple(field.name for field in fields(Sampling))
DEFAULTS = {"ignore_eos": False, "speculative": True}


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
        ignore_eos: write on after an end-of-text token.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in prompt or output; 1.
        presence_penalty: is subtracted from the logits of tokens in the output, in [-2, 2]; 0.
        frequency_penalty: the same, once for every time that a token is there; 0.
        no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and output; 0 allows all.
        logprobs: return the log-probability of every new token, and of this many of the likeliest; at most 20.
        prompt_logprobs: the same of every prompt token but the first, in `RequestOutput.prompt_logprobs`.
        n: outputs per prompt. Output i has the seed `seed + i`.
        logits_processors: functions of the prefix, as transformers' are: `(token ids [1, length], logits [1, vocab])`
            to logits. They must be pure, since drafts ask them about prefixes that the output may not have.
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
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    logits_processors: Sequence[LogitsProcessor] | LogitsProcessor | None = None
    speculative: bool = True
    generation_config: GenerationConfig | Literal[False] | None = None

    def __post_init__(self) -> None:
        whole("n", self.n, 1)
        whole("seed", self.seed)
        flag("speculative", self.speculative)
        flag("ignore_eos", self.ignore_eos)
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens, 1)
        Sampling(**{name: value for name in SAMPLING if (value := getattr(self, name)) is not None})  # checks them

    def options(self) -> dict[str, Any]:
        """What is set here, by the names of `decoding.request.Options`."""
        given = {name: getattr(self, name) for name in SAME_NAME}
        given |= {"max_new_tokens": self.max_tokens, "logits_processor": self.logits_processors}
        return {name: value for name, value in given.items() if value is not None and value != DEFAULTS.get(name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made. It changes speed and never a token.

    Args:
        policy: a name among `selfspec.control.registry.POLICIES`, or a `selfspec.Policy`; default: `adaptive`, which
            learns what pays and needs no settings, or `fixed` where one of the next two is given.
        exit_layer: layers that draft, 1..num_layers - 1.
        num_speculative_tokens: tokens drafted per round.
        drafters: where `adaptive` may take drafts from, some of "exit" (early layers), "lookup" (what followed earlier
            in the text, in finished responses or in a corpus), "copies" (4-bit copies of early layers in their place)
            and "tree" (second choices beside first ones); default: all.
        corpus: a file that `selfspec corpus build` wrote, or an open `selfspec.Datastore`, for lookup.
        reuse_responses: look drafts up in the responses that this LLM finished before, too, 200,000 tokens of them, the
            least recently used out first; those of requests with `speculative=False` are among them. Tokens never
            change, but the speed of a request can tell that a similar text was written before: turn it off where
            requests must not learn of each other. An engine (`LLM.engine`) with compiled layers also keeps the keys and
            values of the sequence that ended last, for a prompt that begins with the same tokens.
        learn: train exit heads on refused drafts meanwhile; True, or a `selfspec.learn.Learner` of this model.

    Raises:
        ValueError: an unknown policy or drafter, or a number out of range.
    """

    policy: str | Policy | None = None
    exit_layer: int | None = None
    num_speculative_tokens: int | None = None
    drafters: Sequence[str] | None = None
    corpus: str | Path | Datastore | None = None
    reuse_responses: bool = True
    learn: bool | Learner = False

    def __post_init__(self) -> None:
        is_name = isinstance(self.policy, str) and self.policy in POLICIES
        if not (self.policy is None or isinstance(self.policy, Policy) or is_name):
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, or a selfspec.Policy, {got(self.policy)}")
        for name, least in (("exit_layer", 1), ("num_speculative_tokens", 0)):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), least)
        drafters: Any = self.drafters
        are_several = isinstance(drafters, Collection) and not isinstance(drafters, str)
        if drafters is not None and not (are_several and drafters and all(one in DRAFTS for one in drafters)):
            raise ValueError(f"drafters must be some of {', '.join(DRAFTS)}, {got(drafters)}")
        is_fixed = self.exit_layer is not None or self.num_speculative_tokens is not None
        if drafters is not None and self.policy != "adaptive" and not (self.policy is None and not is_fixed):
            raise ValueError(
                "drafters are those of the policy adaptive, got another policy, or fixed by exit_layer or "
                "num_speculative_tokens alone; add policy='adaptive', or leave drafters out"
            )
        flag("reuse_responses", self.reuse_responses)
        if not isinstance(self.learn, bool | Learner):
            raise ValueError(f"learn must be True, False or a selfspec.learn.Learner, {got(self.learn)}")

    def drafting(self) -> dict[str, Any]:
        """The same, by the names of `Target.rounds`."""
        return {
            "policy": self.policy,
            "exit_layer": self.exit_layer,
            "num_draft_tokens": self.num_speculative_tokens,
            "drafts": self.drafters,
            "datastore": self.corpus,
            "reuse_responses": self.reuse_responses,
            "learn": self.learn,
        }
