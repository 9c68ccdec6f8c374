"""What /tokenize and /detokenize are sent, as vLLM and llama-server have it, and what they answer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from selfspec.serving.protocol import INT32, Body, ChatRequest, CompletionRequest, chat_request
from selfspec.serving.refusal import Refusal
from selfspec.serving.token_texts import TokenTexts
from selfspec.serving.tokens import Reader

CHAT_FIELDS = ChatRequest.model_fields.keys()


class TokenizeRequest(Body):
    """A text, `prompt` or llama-server's `content`; or a conversation, `messages`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    async def tokens(self, reader: Reader) -> list[int]:
        """The token ids.

        Raises:
            Refusal: there is nothing to tokenize.
        """
        if self.messages is not None:
            shared = {name: getattr(self, name) for name in TokenizeRequest.model_fields if name in CHAT_FIELDS}
            return await reader.chat(chat_request(shared))
        text = self.content if self.prompt is None else self.prompt
        if text is None:
            raise Refusal("prompt must be a text; or send messages", param="prompt", code="missing_required_parameter")
        given = self.add_special_tokens if self.add_special is None else self.add_special
        special = self.prompt is not None if given is None else given
        if not text:
            return []
        [ids] = await reader.prompts(CompletionRequest(prompt=text, add_special_tokens=special), fits=False)
        return ids

    def answer(self, ids: list[int], reader: Reader, tokens: TokenTexts) -> dict[str, Any]:
        """The body of the answer."""
        body = {"count": len(ids), "max_model_len": reader.max_model_len, "tokens": ids}
        return body | ({"token_strs": [tokens.text(token) for token in ids]} if self.return_token_strs else {})


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=INT32)]], Field(fail_fast=True)]
