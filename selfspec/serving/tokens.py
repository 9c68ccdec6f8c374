"""`Reader`: clients' prompts and conversations as token ids."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, TypeVar

from selfspec.llm import LLM
from selfspec.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest
from selfspec.serving.refusal import Refusal, too_long
from selfspec.serving.structured import structured_outputs
from selfspec.structured.tool_calls import ToolUse

SHORT = 4096  # characters that are tokenized at once, without a thread
Value = TypeVar("Value")


class Reader:
    """Tokenizes what clients send.

    Args:
        llm: whose tokenizer reads.
        chat_template: a Jinja template; None: the tokenizer's own.
        tool_call_parser: the format of calls; None: the template's.
    """

    def __init__(self, llm: LLM, chat_template: str | None = None, tool_call_parser: str | None = None) -> None:
        self._llm, self.tokenizer, self._given = llm, llm.tokenizer, chat_template
        self._parser = tool_call_parser
        self._vocab_size = llm.target.split.vocab_size
        self.max_model_len = llm.target.split.context_limit
        """Most tokens of a prompt and its answer."""
        self._longest_token = 1 if llm.tokenizer is None else max(map(len, llm.tokenizer.get_vocab()))
        self._one_at_a_time = asyncio.Lock()
        template: Any = getattr(llm.tokenizer, "apply_chat_template", None)
        self._own_names = {"messages"} if template is None else {"messages", *signature(template).parameters}

    @property
    def template(self) -> str | None:
        """The chat template."""
        return self._given or getattr(self.tokenizer, "chat_template", None)

    async def prompts(self, request: CompletionRequest, fits: bool = True) -> list[list[int]]:
        """Token ids of every prompt.

        Args:
            fits: refuse those that leave no place for an answer.

        Raises:
            Refusal: an empty prompt, or a text that has none.
        """
        given, is_cut = request.prompts, request.truncate_prompt_tokens is not None
        if not given:
            raise Refusal("prompt must not be empty", param="prompt")
        texts = [one for one in given if isinstance(one, str)]
        if texts and self.tokenizer is None:
            raise Refusal("prompt is a text, and this model has no tokenizer; send token ids", param="prompt")
        for text in texts:
            self._check_text(text, "prompt", is_cut or not fits)
        options = {} if request.add_special_tokens is None else {"add_special_tokens": request.add_special_tokens}
        made = await self._away(sum(map(len, texts)), lambda: [self._ids(one, options) for one in given])
        made = [self._fitted(ids, request, "prompt") for ids in made] if fits else made
        last = self._vocab_size - 1
        if any(min(ids) < 0 or max(ids) > last for ids in made):
            raise Refusal(f"prompt must hold token ids in 0..{last}, the model's vocabulary", param="prompt")
        return made

    async def texts(self, request: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Every prompt as a text, as it was sent where it was one and is not cut."""
        given, skips = request.prompts, request.skip_special_tokens is not False
        made = prompts if request.truncate_prompt_tokens is not None else given
        size = sum(len(one) for one in made if not isinstance(one, str))
        return await self._away(size, lambda: [one if isinstance(one, str) else self.text(one, skips) for one in made])

    async def tools(self, request: ChatRequest) -> ToolUse | None:
        """How the model calls a request's tools; None: it shall not.

        Raises:
            Refusal: a tool is wrong.
        """
        given = request.tools or []
        if not given and request.tool_choice is None:
            return None
        self._check_text(json.dumps(given, ensure_ascii=False), "tools", True)
        text = structured_outputs(request.shapes)
        asked = (given, request.tool_choice, request.parallel_tool_calls, self._parser, self._given, text)
        try:
            return await self._away(SHORT * len(given), lambda: self._llm.tool_use(*asked))
        except ValueError as problem:
            raise Refusal(str(problem), param=re.split(r"\W", str(problem))[0]) from problem

    async def chat(self, request: ChatRequest, use: ToolUse | None = None) -> list[int]:
        """Token ids of a conversation, up to where the model answers.

        Raises:
            Refusal: there is no chat template, or it refuses the conversation.
        """
        messages, more = request.conversation, request.chat_template_kwargs or {}
        for message in messages:
            self._check_text(message["content"], "messages", request.truncate_prompt_tokens is not None)
        size = sum(len(str(message)) for message in messages)
        for name in more:
            if name in self._own_names:
                where = "chat_template_kwargs"
                raise Refusal(f"{where}.{name} is not for clients to choose; leave it out", param=where)
        if request.add_special_tokens:
            raise Refusal(
                "add_special_tokens must be false in a chat, whose template writes them; leave it out",
                param="add_special_tokens",
            )
        options = request.template_options | more
        if use is not None:
            options["tools"] = use.as_dicts
            size += len(use.outputs.lark)
        try:
            ids = await self._away(size, lambda: self._llm.chat_prompt(messages, self._given, **options))
        except ValueError as problem:
            raise Refusal(str(problem), param="messages") from problem
        return self._fitted(ids, request, "messages")

    async def prediction(self, request: ChatRequest) -> list[int]:
        """Token ids of what the answer is expected to be, as far as the context holds them."""
        if request.prediction is None:
            return []
        text = request.prediction.text[: self.max_model_len * self._longest_token]
        self._check_text(text, "prediction", True)
        return (await self._away(len(text), lambda: self._ids(text, {"add_special_tokens": False})))[
            : self.max_model_len
        ]

    def text(self, prompt: Sequence[int], skips_special: bool = False) -> str:
        """Token ids as a text."""
        if self.tokenizer is None:
            return ""
        options = {"skip_special_tokens": skips_special, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(prompt, **options))

    def _fitted(self, ids: list[int], request: GenerationRequest, name: str) -> list[int]:
        """A prompt that leaves place for an answer, cut where the client asks for that."""
        most = request.truncate_prompt_tokens
        if most is not None:
            most = self.max_model_len - 1 if most == -1 else most
            ids = ids[:most] if request.truncation_side == "right" else ids[max(0, len(ids) - most) :]
        if not ids:
            raise Refusal(f"{name} must have at least one token", param=name)
        if len(ids) >= self.max_model_len:
            raise too_long(len(ids), "tokens", self.max_model_len, name)
        return ids

    def _ids(self, prompt: str | Sequence[int], options: dict[str, Any]) -> list[int]:
        found = self.tokenizer(prompt, **options)["input_ids"] if isinstance(prompt, str) else prompt
        return [int(token) for token in found]

    async def _away(self, size: int, work: Callable[[], Value]) -> Value:
        """Do long work in another thread, one piece after another: tokenizers do not promise more."""
        if size <= SHORT:
            return work()
        async with self._one_at_a_time:
            return await asyncio.to_thread(work)

    def _check_text(self, text: str, name: str, is_cut: bool) -> None:
        if len(text) > self.max_model_len * self._longest_token and not is_cut:  # no context can hold it
            raise too_long(len(text), "characters", self.max_model_len, name)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refusal(f"{name} holds half a character (a lone surrogate)", param=name) from None
