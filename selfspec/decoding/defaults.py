"""`GenerationDefaults`: requests from prompts and parameters, completed by the model's generation config.

It is applied as transformers' own `generate` applies it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as lp

from selfspec.core import Request
from selfspec.errors import whole
from selfspec.executors.logit_rules import with_logit_rules
from selfspec.params import SamplingParams
from selfspec.structured.grammars import Grammars

FILTERS = (lp.TemperatureLogitsWarper, lp.TopKLogitsWarper, lp.TopPLogitsWarper, lp.MinPLogitsWarper)
# Of `SamplingParams`, in the order in which they are applied:
FILTER_NAMES = ("temperature", "top_k", "top_p", "min_p")
PENALTY_NAMES = ("repetition_penalty", "no_repeat_ngram_size")
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
TOP_K = 50  # what `generate` samples with where nobody names it

# Settings that become logits processors, with a value that asks for nothing; None does so everywhere.
PROCESSORS: dict[str, Any] = {
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "renormalize_logits": False,
}
WARPERS: dict[str, Any] = {"top_h": None, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}  # of sampling
ENDS = ("eos_token_id", "stop_strings", "max_new_tokens", "max_length")
# Settings of another kind of decoding, or that no function of the prefix can stand for.
REFUSED: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "guidance_scale": 1.0,
    "watermarking_config": None,
    "token_healing": False,
    "num_return_sequences": 1,
    "max_time": None,
}
NAMES = ("do_sample", "cache_implementation", *FILTER_NAMES, *ENDS, *PROCESSORS, *WARPERS, *REFUSED)
OVERRIDE = "generation_config=False (--ignore-generation-config) leaves it out"
Settings = dict[str, Any]
_log = logging.getLogger("selfspec")
Prompt = str | Sequence[int] | Mapping[str, Any]  # a text, token ids, or {"prompt": ...} or {"prompt_token_ids": ...}


class GenerationDefaults:
    """Makes requests. The model's generation config is read anew for every one.

    Args:
        model: the causal LM; None: there are no defaults.
        tokenizer: of text prompts; None: prompts are token ids.
    """

    def __init__(self, model: Any = None, tokenizer: Any = None) -> None:
        self._model, self.tokenizer = model, tokenizer
        self.grammars = Grammars(tokenizer)
        """Of structured outputs."""
        self._has_reported = self._has_reported_template = False  # what was taken from it; that there is a template

    @property
    def config(self) -> GenerationConfig | None:
        """The model's generation config."""
        return getattr(self._model, "generation_config", None)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-text tokens: the generation config's, else the config's, else the tokenizer's."""
        for holder in (self.config, getattr(self._model, "config", None), self.tokenizer):
            ids = getattr(holder, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    def requests(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[Request]]:
        """The prompt's text, if it was given as one, and the requests of its `n` outputs, with seeds of their own.

        Raises:
            ValueError: an empty prompt, text without a tokenizer, `n` above 1 of a greedy request, or a setting of the
                generation config that is not served.
        """
        given = _content(prompt)
        text = given if isinstance(given, str) else None
        request = self.complete(Request(self._token_ids(given), params, self.eos_token_ids))
        if text is not None:
            self._report_template(text)
        if params.n == 1:
            return text, [request]
        if request.params.is_greedy:
            raise ValueError(f"n must be 1 with greedy decoding, whose outputs are all the same, got {params.n}")
        seeds = range(params.seed + 1, params.seed + params.n)  # the first one reads the prompt for all
        others = [replace(request.params, seed=seed, prompt_logprobs=None) for seed in seeds]
        return text, [request, *[replace(request, params=other) for other in others]]

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt is text but there is no tokenizer; pass token ids, or load with tokenizer=...")
            ids = self._encoded("prompt", prompt)
        else:
            given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
            if not hasattr(given, "__iter__") or isinstance(given, bytes):
                raise ValueError(f"prompts must be texts or lists of token ids, got a {type(prompt).__name__}")
            ids = [whole("a prompt's token id", token) for token in given]
        return ids

    def _report_template(self, text: str) -> None:
        """Say once that a text is continued as it is, where the tokenizer has a chat template that it has not seen."""
        if self._has_reported_template or not getattr(self.tokenizer, "chat_template", None):
            return
        marks = [str(token) for token in getattr(self.tokenizer, "all_special_tokens", ())]  # which a template writes
        if not any(mark in text for mark in marks):
            self._has_reported_template = True
            _log.warning(
                "texts are continued as they are, although this model's tokenizer has a chat template; for answers, "
                "call LLM.chat(messages), or pass what tokenizer.apply_chat_template(messages, "
                "add_generation_prompt=True, return_dict=False) returns"
            )

    def complete(self, request: Request) -> Request:
        """A request with what the config asks for wherever its parameters name nothing else.

        Of `params.generation_config`, what is set there wins over the model's own, and False leaves both out.

        Raises:
            ValueError: a setting that is not served, with its name; a value out of range; a prompt that leaves no token
                of `max_length`; stop strings without a tokenizer.
        """
        return with_logit_rules(self._completed(self._with_prediction(request)))

    def _with_prediction(self, request: Request) -> Request:
        """The request, its prediction in token ids."""
        text = request.params.prediction
        if not isinstance(text, str):
            return request
        if self.tokenizer is None:
            raise ValueError("prediction is a text but there is no tokenizer; pass token ids")
        ids = tuple(self._encoded("prediction", text, add_special_tokens=False))
        return replace(request, params=replace(request.params, prediction=ids))

    def _encoded(self, name: str, text: str, **options: Any) -> list[int]:
        """The token ids of a text; ValueError where it cannot be written in UTF-8, which tokenizers ask for."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} holds half a character (a lone surrogate); leave it out") from None
        return [int(token) for token in self.tokenizer(text, **options)["input_ids"]]

    def _completed(self, request: Request) -> Request:
        over = request.params.generation_config
        if over is False:
            return request
        if not (over is None or isinstance(over, GenerationConfig)):
            raise ValueError(
                "generation_config must be a GenerationConfig, whose values win over the model's own, or False, which "
                f"leaves those out, got {type(over).__name__}"
            )
        own, first = _settings(self.config), _settings(over)
        if not first and own.keys() <= {"eos_token_id"}:
            return request
        given = _given(request.params)
        taken = _taken({**own, **first}, given, request.params.temperature or 0.0)
        reported = {name: value for name, value in taken.items() if name not in first}
        completed = self._with(request, taken, first.get("eos_token_id"))
        if reported and not self._has_reported:
            self._has_reported = True
            settings = _say(reported)
            _log.warning("the model's generation config is applied: %s; options win over it, %s", settings, OVERRIDE)
        return completed

    def _with(self, request: Request, taken: Settings, eos: Any) -> Request:
        """A request with the settings taken, and the end-of-text ids `eos` if there are any."""
        changes: dict[str, Any] = {name: taken[name] for name in FILTER_NAMES if name in taken}
        if eos is not None:
            request = replace(request, eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos))
        if "stop_strings" in taken:
            if self.tokenizer is None:
                raise ValueError(
                    f"the generation config sets stop_strings={taken['stop_strings']!r}, which need a tokenizer to "
                    f"turn tokens into text; load with tokenizer=..., or {OVERRIDE}"
                )
            changes["stop"] = taken["stop_strings"]
        if (most := _most_new(taken, len(request.prompt_token_ids))) is not None:
            changes |= {"max_tokens": most, "min_tokens": min(request.params.min_tokens, most)}
        try:
            if changes:
                request = replace(request, params=replace(request.params, **changes))
            if any(name in PROCESSORS or name in WARPERS for name in taken):
                processors = self._processors(request, taken)
                rest, fields = peel(processors, not request.params.is_greedy)
                changes = dict.fromkeys((*FILTER_NAMES, *PENALTY_NAMES)) | fields | {"logits_processors": rest or None}
                request = replace(request, params=replace(request.params, **changes))
        except (ValueError, TypeError) as problem:
            raise ValueError(f"the generation config is of no use ({problem}); {OVERRIDE}") from problem
        return request

    def _processors(self, request: Request, taken: Settings) -> list[Any]:
        """What `generate` makes of the settings for this prompt, the caller's own processors where it puts them."""
        device = self._model.get_input_embeddings().weight.device
        config: Any = GenerationConfig()
        for name in (*PROCESSORS, *WARPERS):
            setattr(config, name, taken.get(name))
        params, eos = request.params, request.eos_token_ids
        own = dict(zip(FILTER_NAMES, params.filters, strict=True))
        own |= {"repetition_penalty": params.penalties[0], "no_repeat_ngram_size": params.penalties[3]}
        config.do_sample = not params.is_greedy
        for name in PENALTY_NAMES:  # of the request, where the config's are not taken; none where that asks for nothing
            setattr(config, name, taken.get(name, own[name]))
        config.repetition_penalty = float(config.repetition_penalty)
        for name in FILTER_NAMES:
            value = own[name]
            setattr(config, name, None if value == OFF[name] else type(OFF[name])(value))
        config._eos_token_tensor = torch.tensor(sorted(eos), device=device) if eos else None
        if not eos:
            config.exponential_decay_length_penalty = None  # it is one of the end-of-text token
        config.max_length = len(request.prompt_token_ids) + request.max_tokens
        processors = self._model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(request.prompt_token_ids),
            encoder_input_ids=torch.tensor([request.prompt_token_ids], device=device),
            logits_processor=lp.LogitsProcessorList(params.processors),
            device=device,
        )
        return list(processors)


def _settings(config: Any) -> Settings:
    """Those of `NAMES` that a config sets."""
    held = {} if config is None else vars(config)  # in a fraction of the time that reading one by one takes
    return {name: held[name] for name in NAMES if held.get(name) is not None}


def _given(params: SamplingParams) -> set[str]:
    """The settings that a caller named, by their names in a generation config."""
    names = (*FILTER_NAMES, *PENALTY_NAMES)
    given = {name for name in names if getattr(params, name) is not None}
    if params.max_tokens is not None:
        given.add("max_new_tokens")
    return given | ({"stop_strings"} if params.stop is not None else set())


def _taken(config: Settings, given: set[str], temperature: float) -> Settings:
    """What a request takes from a config: what asks for something, and what the caller does not name.

    Args:
        temperature: the caller's.

    Raises:
        ValueError: a setting that is not served.
    """
    samples = config.get("do_sample") is True
    is_sampled = temperature > 0 if "temperature" in given else samples
    _refuse(config, is_sampled)
    taken: Settings = {}
    if is_sampled:
        stored = {"top_k": TOP_K, **config} if samples else config
        if "temperature" not in given:
            taken |= {"do_sample": True, "temperature": config.get("temperature", 1.0)}
        for name in FILTER_NAMES[1:]:
            if name not in given and stored.get(name, OFF[name]) != OFF[name]:
                taken[name] = stored[name]
    for names in (PROCESSORS, WARPERS) if is_sampled else (PROCESSORS,):
        asked = {name: config[name] for name, off in names.items() if _asks(config.get(name), off)}
        taken |= {name: value for name, value in asked.items() if name not in given}
    if "min_new_tokens" in config:
        taken.pop("min_length", None)
    if "max_new_tokens" not in given:
        lengths = [name for name in ("max_new_tokens", "max_length") if name in config]
        taken |= {name: config[name] for name in lengths[:1]}  # the first wins
    if "stop_strings" not in given and config.get("stop_strings"):
        taken["stop_strings"] = config["stop_strings"]
    return taken


def _asks(value: Any, off: Any) -> bool:
    """Whether a setting asks for anything; 0 may be a token."""
    return value is not None and value is not False and not (off is not None and value == off) and value not in ([], {})


def _refuse(config: Settings, is_sampled: bool) -> None:
    refused = {name: config[name] for name, off in REFUSED.items() if _asks(config.get(name), off)}
    if is_sampled or config.get("top_k", TOP_K) <= 1:
        refused.pop("penalty_alpha", None)  # contrastive search is what it means elsewhere
    if config.get("cache_implementation") == "quantized":
        refused["cache_implementation"] = "quantized"
    if refused:
        raise ValueError(
            f"the generation config sets {_say(refused)}, which selfspec does not decode with; {OVERRIDE}, and "
            "transformers' own generate() serves it"
        )


def _most_new(taken: Settings, num_prompt_tokens: int) -> int | None:
    """Most new tokens by a config, where that says anything."""
    if "max_length" not in taken:
        return taken.get("max_new_tokens")
    most = int(taken["max_length"]) - num_prompt_tokens
    if most < 1:
        raise ValueError(
            f"the generation config sets max_length={taken['max_length']}, which a prompt of {num_prompt_tokens} "
            f"tokens leaves no room in; give max_new_tokens, or {OVERRIDE}"
        )
    return most


def _say(settings: Settings) -> str:
    """Names and values; long lists are cut."""
    texts = [f"{name}={value!r}" for name, value in settings.items()]
    return ", ".join(text if len(text) <= 80 else f"{text[:77]}..." for text in texts)


def peel(
    processors: Iterable[Any], do_sample: bool, row: int = 0, num_padding: int = 0
) -> tuple[list[Any], dict[str, Any]]:
    """The rest of the list, and as `SamplingParams` the penalties that began it and the filters that ended it.

    Args:
        row: of the batch that the processors are for.
        num_padding: tokens of padding before the row's own; penalties that read them stay in the list.
    """
    rest, fields = list(processors), {"temperature": 1.0 if do_sample else 0.0}
    for kind, name in list(zip(FILTERS, FILTER_NAMES, strict=True))[::-1] if do_sample else ():
        last = rest[-1] if rest else None
        usual = getattr(last, "filter_value", -torch.inf) == -torch.inf and getattr(last, "min_tokens_to_keep", 1) == 1
        if type(last) is kind and usual and getattr(last, name) > 0:
            fields[name] = getattr(rest.pop(), name)
    if rest and type(rest[0]) is lp.RepetitionPenaltyLogitsProcessor and _skipped(rest[0], row) == num_padding:
        fields["repetition_penalty"] = rest.pop(0).penalty
    if rest and type(rest[0]) is lp.NoRepeatNGramLogitsProcessor and not num_padding:
        fields["no_repeat_ngram_size"] = rest.pop(0).ngram_size
    return rest, fields


def _content(prompt: Any) -> Any:
    """The text or the token ids of a prompt."""
    if not isinstance(prompt, Mapping):
        return prompt
    found = [prompt[name] for name in ("prompt_token_ids", "prompt") if name in prompt]
    if not found:
        raise ValueError(f"a prompt's mapping must have 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
    return found[0]


def _skipped(penalty: lp.RepetitionPenaltyLogitsProcessor, row: int) -> int:
    """First tokens of a row that a repetition penalty does not count."""
    skipped = getattr(penalty, "prompt_ignore_length", None)  # some versions count all
    return int(skipped[row]) if isinstance(skipped, torch.Tensor) else skipped or 0
