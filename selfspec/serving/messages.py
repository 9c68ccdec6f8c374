"""Anthropic's /v1/messages: its requests as `ChatRequest`s, and its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from pydantic import Field

from selfspec.serving.bodies import ChatWriter, event
from selfspec.serving.calls import Choice
from selfspec.serving.protocol import MOST_PARTS, MOST_STOPS, Body, ChatRequest, GenerationRequest, translated
from selfspec.serving.refusal import ANTHROPIC, Refusal

THOUGHTS = ("thinking", "redacted_thinking")  # what a model thought is no part of what it is told
Blocks = Annotated[list[dict[str, Any]], Field(max_length=MOST_PARTS, fail_fast=True)]


class Turn(Body):
    """A message: a text, or blocks of text, of tools' uses and of their results."""

    role: str
    content: str | Blocks


class MessagesRequest(GenerationRequest):
    """Answer a conversation. Where its last message is the assistant's, the answer goes on from it."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MOST_PARTS, fail_fast=True)]
    system: str | Blocks | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None

    @property
    def num_likely(self) -> int | None:
        return None

    def as_chat(self) -> ChatRequest:
        """The internal request.

        Raises:
            Refusal: what is not served.
        """
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = system + [one for turn in self.messages for one in _messages_of(turn)]
        more: dict[str, Any] = {"messages": messages, "stop": self.stop_sequences or self.stop}
        return translated(self, more | {"continue_final_message": self.messages[-1].role == "assistant"})


def _messages_of(turn: Turn) -> list[dict[str, Any]]:
    """A turn as messages of OpenAI's: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results, texts, calls = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for block in turn.content:
        kind = block.get("type")
        if kind == "tool_result":
            result = {"tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
            results.append({"role": "tool", **result})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind not in THOUGHTS:
            texts.append(block)
    own: dict[str, Any] = {"role": turn.role, "content": texts} | ({"tool_calls": calls} if calls else {})
    return [*results, own] if texts or calls or not results else results


class MessagesWriter(ChatWriter):
    """Answers of /v1/messages."""

    def body(self) -> dict[str, Any]:
        [choice] = self.call.choices
        return self._message([{"type": "text", "text": choice.text}], choice)

    async def events(self) -> AsyncIterator[bytes]:
        def told(kind: str, **more: Any) -> bytes:
            return event({"type": kind, **more}, kind)

        yield told("message_start", message=self._message([], None))
        yield told("content_block_start", index=0, content_block={"type": "text", "text": ""})
        last = self.call.choices[0]
        try:
            async for [piece] in self.call.changes():
                last = piece
                yield told("content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text})
        except Refusal as problem:
            yield event(problem.body_for(ANTHROPIC), "error")
            return
        yield told("content_block_stop", index=0)
        yield told("message_delta", delta=_end_of(last), usage=self._tokens())
        yield told("message_stop")

    def _message(self, content: list[dict[str, Any]], ended: Choice | None) -> dict[str, Any]:
        head = {"id": self.call.name, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return head | _end_of(ended) | {"usage": self._tokens()}

    def _tokens(self) -> dict[str, Any]:
        cached = self.call.num_cached_tokens
        counts = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        return {"input_tokens": self.call.num_prompt_tokens - cached, "output_tokens": self.call.num_tokens, **counts}


def _end_of(ended: Choice | None) -> dict[str, Any]:
    """Why an output ended, in Anthropic's words; None: it has not."""
    if ended is None:
        return {"stop_reason": None, "stop_sequence": None}
    if isinstance(ended.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop_reason}
    return {"stop_reason": "max_tokens" if ended.finish_reason == "length" else "end_turn", "stop_sequence": None}
