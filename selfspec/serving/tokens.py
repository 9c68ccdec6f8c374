"""`Reader`: clients' prompts and conversations as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, TypeVar

from selfspec.llm import LLM
from selfspec.serving.protocol import ChatRequest, Refusal

SHORT = 4096  # characters that are tokenized at once, without a thread
Value = TypeVar("Value")


class Reader:
    """Tokenizes what clients send.

    Args:
        llm: whose tokenizer reads.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm, self.tokenizer = llm, llm.tokenizer
        self._vocab_size, self._context = llm.target.split.vocab_size, llm.target.split.context_limit
        longest = 1 if llm.tokenizer is None else max(map(len, llm.tokenizer.get_vocab()))
        self._most_characters = self._context * longest  # of a text that the context can hold
        self._one_at_a_time = asyncio.Lock()
        template: Any = getattr(llm.tokenizer, "apply_chat_template", None)
        self._own_names = {"messages"} if template is None else {"messages", *signature(template).parameters}

    async def prompts(self, given: Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
        """Token ids of every prompt.

        Raises:
            Refusal: an empty prompt, or a text that has none.
        """
        if not given:
            raise Refusal("prompt must not be empty", param="prompt")
        texts = [one for one in given if isinstance(one, str)]
        if texts and self.tokenizer is None:
            raise Refusal("prompt is a text, and this model has no tokenizer; send token ids", param="prompt")
        for text in texts:
            self._check_text(text, "prompt")
        for ids in given:
            if not isinstance(ids, str) and len(ids) > self._context:
                raise _too_long(len(ids), "tokens", self._context, "prompt")
        made = await self._away(sum(map(len, texts)), lambda: [self._ids(one) for one in given])
        if not all(made):
            raise Refusal("prompt must have at least one token", param="prompt")
        last = self._vocab_size - 1
        if any(min(ids) < 0 or max(ids) > last for ids in made):
            raise Refusal(f"prompt must hold token ids in 0..{last}, the model's vocabulary", param="prompt")
        return made

    async def texts(self, given: Sequence[str] | Sequence[Sequence[int]]) -> list[str]:
        """Every prompt as a text, as it was sent where it was one."""
        size = sum(len(one) for one in given if not isinstance(one, str))
        return await self._away(size, lambda: [self._text(one) for one in given])

    async def chat(self, request: ChatRequest) -> list[int]:
        """Token ids of a conversation, up to where the model answers.

        Raises:
            Refusal: there is no chat template, or it refuses the conversation.
        """
        messages = [message.as_dict() for message in request.messages]
        for message in messages:
            self._check_text(str(message["content"] or ""), "messages")
        size = sum(len(str(message)) for message in messages)
        more = request.chat_template_kwargs or {}
        for name in more:
            if name in self._own_names:
                where = "chat_template_kwargs"
                raise Refusal(f"{where}.{name} is not for clients to choose; leave it out", param=where)
        try:
            ids = await self._away(size, lambda: self._llm.chat_prompt(messages, **more))
        except Exception as problem:  # templates are programs, which raise what they like
            reason = str(problem) or type(problem).__name__
            raise Refusal(f"the chat template refuses this conversation ({reason})", param="messages") from problem
        if not ids:
            raise Refusal("messages must have at least one token", param="messages")
        return ids

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        return [int(token) for token in (self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)]

    def _text(self, prompt: str | Sequence[int]) -> str:
        if isinstance(prompt, str) or self.tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        return str(self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False))

    async def _away(self, size: int, work: Callable[[], Value]) -> Value:
        """Do long work in another thread, one piece after another: tokenizers do not promise more."""
        if size <= SHORT:
            return work()
        async with self._one_at_a_time:
            return await asyncio.to_thread(work)

    def _check_text(self, text: str, name: str) -> None:
        if len(text) > self._most_characters:
            raise _too_long(len(text), "characters", self._context, name)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refusal(f"{name} holds half a character (a lone surrogate)", param=name) from None


def _too_long(length: int, units: str, context: int, name: str) -> Refusal:
    return Refusal(
        f"{name} has {length} {units} and the model's context holds {context} tokens; shorten it", param=name
    )
