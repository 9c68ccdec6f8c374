"""Anthropic's /v1/messages: its requests as `ChatRequest`s, and its answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field

from selfspec.serving.bodies import ChatWriter, event
from selfspec.serving.calls import Choice
from selfspec.serving.protocol import (
    MOST_PARTS,
    MOST_STOPS,
    Body,
    ChatRequest,
    GenerationRequest,
    Tools,
    translated,
)
from selfspec.serving.refusal import ANTHROPIC, Refusal, shown
from selfspec.structured.formats import CallPiece
from selfspec.structured.tool_calls import gathered

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
    tools: Tools | None = None
    tool_choice: dict[str, Any] | None = None
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
        if self.tools is not None:
            more["tools"] = [_tool(one, f"tools[{i}]") for i, one in enumerate(self.tools)]
        if self.tool_choice is not None:
            more |= {"tool_choice": _choice(self.tool_choice)}
            more |= {"parallel_tool_calls": False} if self.tool_choice.get("disable_parallel_tool_use") else {}
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


def _tool(given: dict[str, Any], name: str) -> dict[str, Any]:
    """A tool in OpenAI's words.

    Raises:
        Refusal: it is one of Anthropic's own.
    """
    if given.get("type") not in (None, "custom"):
        message = f"{name} is of type {shown(given['type'])}, which is not served; send tools with an input_schema"
        raise Refusal(message, param="tools")
    own = {"parameters": given.get("input_schema")}
    return {"type": "function", "function": own | {one: given.get(one) for one in ("name", "description", "strict")}}


def _choice(given: dict[str, Any]) -> Any:
    """A `tool_choice` in OpenAI's words."""
    if given.get("type") == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}
    modes, kind = {"auto": "auto", "any": "required", "none": "none"}, given.get("type")
    if not isinstance(kind, str) or kind not in modes:
        message = f"tool_choice must have a type, auto, any, tool or none, got {shown(given)}"
        raise Refusal(message, param="tool_choice")
    return modes[kind]


class MessagesWriter(ChatWriter):
    """Answers of /v1/messages."""

    def body(self) -> dict[str, Any]:
        [choice] = self.call.choices
        text, calls = gathered(self.pieces(choice))
        content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
        content += [self._tool_use(i, name, _object(arguments)) for i, (name, arguments) in enumerate(calls)]
        return self._message(content, choice)

    def _tool_use(self, call: int, name: str, given: dict[str, Any]) -> dict[str, Any]:
        return {"type": "tool_use", "id": self.call_id(0, call, "toolu_"), "name": name, "input": given}

    async def events(self) -> AsyncIterator[bytes]:
        def told(kind: str, **more: Any) -> bytes:
            return event({"type": kind, **more}, kind)

        yield told("message_start", message=self._message([], None))
        last = self.call.choices[0]
        try:
            async for [piece] in self.call.changes():
                last = piece
                for at, begins, one in self.parts(piece):
                    if begins and at:
                        yield told("content_block_stop", index=at - 1)
                    if begins:
                        empty = {"type": "text", "text": ""}
                        block = empty if one.call is None else self._tool_use(one.call, one.name or "", {})
                        yield told("content_block_start", index=at, content_block=block)
                    if one.text:
                        yield told("content_block_delta", index=at, delta=_delta(one))
        except Refusal as problem:
            yield event(problem.body_for(ANTHROPIC), "error")
            return
        if not self.num_parts:
            yield told("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield told("content_block_stop", index=max(0, self.num_parts - 1))
        yield told("message_delta", delta=self._ended(last), usage=self._tokens())
        yield told("message_stop")

    def _message(self, content: list[dict[str, Any]], ended: Choice | None) -> dict[str, Any]:
        head = {"id": self.call.name, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return head | self._ended(ended) | {"usage": self._tokens()}

    def _tokens(self) -> dict[str, Any]:
        cached = self.call.num_cached_tokens
        counts = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        return {"input_tokens": self.call.num_prompt_tokens - cached, "output_tokens": self.call.num_tokens, **counts}

    def _ended(self, ended: Choice | None) -> dict[str, Any]:
        """Why an output ended, in Anthropic's words; None: it has not."""
        if ended is None:
            return {"stop_reason": None, "stop_sequence": None}
        if isinstance(ended.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop_reason}
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        return {"stop_reason": reasons.get(self.end_of(ended) or "", "end_turn"), "stop_sequence": None}


def _object(text: str) -> dict[str, Any]:
    """The object of a call's arguments; of one that is cut, its whole properties, as in Anthropic's answers."""
    with suppress(ValueError):
        return dict(json.loads(text))
    found, rest, decoder = dict[str, Any](), text.partition("{")[2], json.JSONDecoder()
    with suppress(ValueError):
        while True:
            name, end = decoder.raw_decode(rest.lstrip())
            rest = rest.lstrip()[end:].partition(":")[2].lstrip()
            value, end = decoder.raw_decode(rest)
            if not rest[end:].lstrip().startswith(","):  # a number may go on
                break
            found[name], rest = value, rest[end:].partition(",")[2]
    return found


def _delta(piece: CallPiece) -> dict[str, Any]:
    if piece.call is None:
        return {"type": "text_delta", "text": piece.text}
    return {"type": "input_json_delta", "partial_json": piece.text}
