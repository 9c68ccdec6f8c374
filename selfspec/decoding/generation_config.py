"""What a model's generation config asks for, applied to requests as transformers' own `generate` applies it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as lp

from selfspec.decoding.request import Request
from selfspec.executors.pick import Sampling

FILTERS = (lp.TemperatureLogitsWarper, lp.TopKLogitsWarper, lp.TopPLogitsWarper, lp.MinPLogitsWarper)
FILTER_NAMES = ("temperature", "top_k", "top_p", "min_p")  # of the same in `Sampling`; both are applied in this order
PENALTY_NAMES = ("repetition_penalty", "no_repeat_ngram_size")  # of processors that `Sampling` has, too, in their order
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


class Writer(Protocol):
    """What is asked of a target."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...


class Stored:
    """What is stored with a model for those who ask it: its generation config, which is read anew for every call.

    Args:
        model: the causal LM.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_said = self._is_told_of_chat = False  # what was taken from it; that there is a template

    def mind_chat(self, prompts: Any, tokenizer: Any) -> None:
        """Say once that a text is continued as it is, where the tokenizer has a chat template that it has not seen."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        if self._is_told_of_chat or not getattr(tokenizer, "chat_template", None):
            return
        marks = [str(token) for token in getattr(tokenizer, "all_special_tokens", ())]  # which a template writes
        if any(isinstance(text, str) and not any(mark in text for mark in marks) for text in texts):
            self._is_told_of_chat = True
            _log.warning(
                "texts are continued as they are, although this model's tokenizer has a chat template; for answers, "
                "call LLM.chat(messages), or pass what tokenizer.apply_chat_template(messages, "
                "add_generation_prompt=True, return_dict=False) returns"
            )

    def complete(self, requests: Sequence[Request], options: Mapping[str, Any], target: Writer) -> list[Request]:
        """The requests with what the config asks for wherever the caller's options name nothing else.

        Args:
            options: those that the requests were made from; of `generation_config`, what is set there wins over what
                is stored with the model, and False leaves both out.

        Raises:
            ValueError: a setting that is not served, with its name; a value out of range; a prompt that leaves no token
                of `max_length`; stop strings without a tokenizer.
        """
        over = options.get("generation_config")
        if over is False:
            return list(requests)
        if not (over is None or isinstance(over, GenerationConfig)):
            raise ValueError(
                "generation_config must be a GenerationConfig, whose values win over the model's own, or False, which "
                f"leaves those out, got {type(over).__name__}"
            )
        own, first = _settings(getattr(self._model, "generation_config", None)), _settings(over)
        merged, made, told = {**own, **first}, [], dict[str, Any]()
        if not first and own.keys() <= {"eos_token_id"}:
            return list(requests)
        for i, request in enumerate(requests):
            given = {name for name, value in options.items() if _of_row(value, i, name) is not None}
            taken = _taken(merged, given, request.sampling.temperature)
            told |= {name: value for name, value in taken.items() if name not in first}
            made.append(self._with(request, taken, given, first.get("eos_token_id"), target))
        if told and not self._is_said:
            self._is_said = True
            _log.warning("the model's generation config is applied: %s; options win over it, %s", _say(told), OVERRIDE)
        return made

    def _with(self, request: Request, taken: Settings, given: set[str], eos: Any, target: Writer) -> Request:
        """A request with the settings taken, and the end-of-text ids `eos` if there are any."""
        changes: dict[str, Any] = {}
        if eos is not None:
            changes["eos"] = frozenset([eos] if isinstance(eos, int) else eos)
        if "stop_strings" in taken:
            if target.tokenizer is None:
                raise ValueError(
                    f"the generation config sets stop_strings={taken['stop_strings']!r}, which need a tokenizer to "
                    f"turn tokens into text; load with tokenizer=..., or {OVERRIDE}"
                )
            stops = taken["stop_strings"]
            changes["stop"] = (stops,) if isinstance(stops, str) else tuple(stops)
        if (most := _most_new(taken, len(request.prompt))) is not None:
            changes["max_new_tokens"] = most
        sampling = request.sampling
        values = {name: taken[name] for name in FILTER_NAMES if name in taken}
        try:
            if values:
                changes["sampling"] = sampling = replace(sampling, **values)
            request = replace(request, **changes) if changes else request
            if any(name in PROCESSORS or name in WARPERS for name in taken):
                ends = target.eos_token_ids if request.eos is None else request.eos
                processors = self._processors(request, taken, ends)
                rest, fields = peel(processors, sampling.temperature > 0)
                fields |= {name: getattr(sampling, name) for name in ("presence_penalty", "frequency_penalty", "seed")}
                sampling = Sampling(**fields)
                request = replace(request, sampling=sampling, logits_processor=tuple(rest))
        except (ValueError, TypeError) as problem:
            raise ValueError(f"the generation config is of no use ({problem}); {OVERRIDE}") from problem
        return request

    def _processors(self, request: Request, taken: Settings, eos: frozenset[int]) -> list[Any]:
        """What `generate` makes of the settings for this prompt, the caller's own processors where it puts them."""
        device = self._model.get_input_embeddings().weight.device
        config: Any = GenerationConfig()
        for name in (*PROCESSORS, *WARPERS):
            setattr(config, name, taken.get(name))
        sampling = request.sampling
        config.do_sample = sampling.temperature > 0
        for name in PENALTY_NAMES:  # of the request, where the config's are not taken; none where that asks for nothing
            setattr(config, name, taken.get(name, getattr(sampling, name)))
        config.repetition_penalty = float(config.repetition_penalty)
        for name in FILTER_NAMES:
            value = getattr(sampling, name)
            setattr(config, name, None if value == OFF[name] else type(OFF[name])(value))
        config._eos_token_tensor = torch.tensor(sorted(eos), device=device) if eos else None
        if not eos:
            config.exponential_decay_length_penalty = None  # it is one of the end-of-text token
        config.max_length = len(request.prompt) + request.max_new_tokens
        processors = self._model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(request.prompt),
            encoder_input_ids=torch.tensor([list(request.prompt)], device=device),
            logits_processor=lp.LogitsProcessorList(request.logits_processor),
            device=device,
        )
        return list(processors)


def _settings(config: Any) -> Settings:
    """Those of `NAMES` that a config sets."""
    held = {} if config is None else vars(config)  # in a fraction of the time that reading one by one takes
    return {name: held[name] for name in NAMES if held.get(name) is not None}


def _of_row(value: Any, row: int, name: str) -> Any:
    """An option's value for one row, see `decoding.request.PER_PROMPT`."""
    return value[row] if name == "max_new_tokens" and isinstance(value, Sequence) else value


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
    if "stop" not in given and config.get("stop_strings"):
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
    room = int(taken["max_length"]) - num_prompt_tokens
    if room < 1:
        raise ValueError(
            f"the generation config sets max_length={taken['max_length']}, which a prompt of {num_prompt_tokens} "
            f"tokens leaves no room in; give max_new_tokens, or {OVERRIDE}"
        )
    return room


def _say(settings: Settings) -> str:
    """Names and values; long lists are cut."""
    texts = [f"{name}={value!r}" for name, value in settings.items()]
    return ", ".join(text if len(text) <= 80 else f"{text[:77]}..." for text in texts)


def peel(
    processors: Iterable[Any], do_sample: bool, row: int = 0, num_padding: int = 0
) -> tuple[list[Any], dict[str, Any]]:
    """The rest of the list, and as fields of `Sampling` the penalties that began it and the filters that ended it.

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


def _skipped(penalty: lp.RepetitionPenaltyLogitsProcessor, row: int) -> int:
    """First tokens of a row that a repetition penalty does not count."""
    skipped = getattr(penalty, "prompt_ignore_length", None)  # some versions count all
    return int(skipped[row]) if isinstance(skipped, torch.Tensor) else skipped or 0
