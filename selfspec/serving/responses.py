"""OpenAI's /v1/responses: its requests as `ChatRequest`s, and its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from selfspec.serving.bodies import ChatWriter, event
from selfspec.serving.calls import Call, Choice
from selfspec.serving.fields import check_fields
from selfspec.serving.protocol import Body, ChatRequest, GenerationRequest, Tools, translated
from selfspec.serving.refusal import Refusal, shown
from selfspec.serving.store import Items, ResponseStore
from selfspec.serving.token_texts import TokenTexts
from selfspec.structured.formats import CallPiece
from selfspec.structured.tool_calls import ToolUse

LOGPROBS = "message.output_text.logprobs"  # in `include`
PLAIN = {"type": "text"}


class TextOptions(Body):
    """The format of the text, as `response_format` of a chat has it."""

    format: dict[str, Any] | None = None


class Reasoning(Body):
    """`effort` is given to the chat template."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(GenerationRequest):
    """Answer an input: a text, or items of a conversation."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def num_likely(self) -> int | None:
        return (self.top_logprobs or 0) if self.top_logprobs or LOGPROBS in (self.include or ()) else None

    @property
    def items(self) -> Items:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    def as_chat(self, before: Items) -> ChatRequest:
        """The internal request.

        Args:
            before: items of the conversation that it goes on with.

        Raises:
            Refusal: what is not served.
        """
        shape = None if self.text is None else self.text.format
        if self.text is not None:
            check_fields(self.text.model_extra or {}, "text.")
            shape = {**shape, "json_schema": shape} if shape and shape.get("type") == "json_schema" else shape
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        messages = [*system, *_messages(before), *_messages(self.items)]
        more: dict[str, Any] = {"messages": messages, "logprobs": self.num_likely is not None}
        more |= {"top_logprobs": self.top_logprobs, "max_completion_tokens": self.max_output_tokens}
        more |= {} if shape is None else {"response_format": shape}
        more |= {"tool_choice": _nested(self.tool_choice), "parallel_tool_calls": self.parallel_tool_calls}
        more |= {"tools": self.tools and [_nested(one) for one in self.tools]}
        return translated(self, more | {"reasoning_effort": self.reasoning and self.reasoning.effort})


def _nested(given: Any) -> Any:
    """A tool, or the choice of one, as chats have it: what a function is called and takes stands in an object."""
    if not isinstance(given, dict):
        return given
    own = {key: value for key, value in given.items() if key != "type"}
    if given.get("type") == "allowed_tools" and isinstance(own.get("tools"), list):
        own["tools"] = [_nested(one) for one in own["tools"]]
    return {"type": given.get("type"), given.get("type"): own}


@dataclass(slots=True)
class Item:
    """An item of a response's output: a message, or a call of a function."""

    head: dict[str, Any]
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_call(self) -> bool:
        return self.head["type"] == "function_call"

    @property
    def part(self) -> dict[str, Any]:
        """The only part of a message."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def as_dict(self, status: str) -> dict[str, Any]:
        """As far as it has come."""
        own = {"arguments": self.text} if self.is_call else {"content": [self.part]}
        return self.head | {"status": status} | own


class ResponsesWriter(ChatWriter):
    """Answers of /v1/responses.

    Args:
        asked: what the client sent.
        before: items of the conversation that it goes on with.
        store: keeps the response, where the client does not forbid it.
    """

    def __init__(
        self,
        asked: ResponsesRequest,
        before: Items,
        store: ResponseStore,
        request: ChatRequest,
        call: Call,
        model: str,
        tokens: TokenTexts,
        use: ToolUse | None = None,
    ) -> None:
        super().__init__(request, call, model, tokens, use)
        self._before, self._store = before, store
        self._asked, self._items = asked, list[Item]()
        self._logprobs = list[dict[str, Any]]()  # of tokens whose text has not come yet
        self._numbers = iter(range(1 << 62))

    def body(self) -> dict[str, Any]:
        [choice] = self.call.choices
        for _ in self._taken(choice):
            pass
        if not self._items:
            self._items.append(self._new_item(None))
        return self._whole(choice)

    async def events(self) -> AsyncIterator[bytes]:
        yield self._event("response.created", response=self._response(None))
        yield self._event("response.in_progress", response=self._response(None))
        last = self.call.choices[0]
        try:
            async for [piece] in self.call.changes():
                last = piece
                for events in self._taken(piece):
                    yield events
        except Refusal as problem:
            yield self._event("error", code=problem.code, message=problem.message, param=problem.param)
            return
        if not self._items:
            self._items.append(self._new_item(None))
            yield self._begun()
        response = self._whole(last)
        yield self._ended(response["output"])
        yield self._event(f"response.{response['status']}", response=response)

    def _whole(self, last: Choice) -> dict[str, Any]:
        """The whole response, which is stored."""
        if not self._items[-1].is_call:
            self._items[-1].logprobs += self._logprobs
        response = self._response(last)
        if self._is_stored:
            self._store.keep(response, [*self._before, *self._asked.items])
        return response

    @property
    def _is_stored(self) -> bool:
        return self._asked.store is not False and self._store.keeps

    def _event(self, kind: str, **more: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(self._numbers), **more}, kind)

    def _taken(self, piece: Choice) -> Iterator[bytes]:
        """Take a piece; its events."""
        self._logprobs += [] if piece.logprobs is None else self.logprobs(piece)
        for at, begins, one in self.parts(piece):
            if begins:
                yield self._ended([item.as_dict("completed") for item in self._items])
                self._items.append(self._new_item(one))
                yield self._begun()
            item, place = self._items[-1], {"item_id": self._items[-1].head["id"], "output_index": at}
            item.text += one.text
            if item.is_call:
                if one.text:
                    yield self._event("response.function_call_arguments.delta", **place, delta=one.text)
                continue
            logprobs, self._logprobs = self._logprobs, []
            item.logprobs += logprobs
            more = {"content_index": 0, "delta": one.text, "logprobs": logprobs}
            yield self._event("response.output_text.delta", **place, **more)

    def _new_item(self, piece: CallPiece | None) -> Item:
        if piece is None or piece.call is None:
            return Item({"id": self.call.name.replace("resp", "msg", 1), "type": "message", "role": "assistant"})
        names = {"call_id": self.call_id(0, piece.call), "name": piece.name}
        return Item({"id": self.call_id(0, piece.call, "fc_"), "type": "function_call", **names})

    def _begun(self) -> bytes:
        """The last item has begun."""
        item, at = self._items[-1], len(self._items) - 1
        empty = item.as_dict("in_progress") | ({} if item.is_call else {"content": []})
        added = self._event("response.output_item.added", output_index=at, item=empty)
        if item.is_call:
            return added
        place = {"item_id": item.head["id"], "output_index": at, "content_index": 0}
        return added + self._event("response.content_part.added", **place, part=item.part)

    def _ended(self, items: list[dict[str, Any]]) -> bytes:
        """The last of the items has ended."""
        if not items:
            return b""
        item, at = self._items[-1], len(items) - 1
        place: dict[str, Any] = {"item_id": item.head["id"], "output_index": at}
        if item.is_call:
            more = {"arguments": item.text, "name": item.head["name"]}
            told = self._event("response.function_call_arguments.done", **place, **more)
        else:
            place |= {"content_index": 0}
            told = self._event("response.output_text.done", **place, text=item.text, logprobs=item.logprobs)
            told += self._event("response.content_part.done", **place, part=item.part)
        return told + self._event("response.output_item.done", output_index=at, item=items[-1])

    def _response(self, ended: Choice | None) -> dict[str, Any]:
        """The response as it is; None: nothing of it has ended."""
        status, reason, params = "in_progress", None, self.call.params
        if ended is not None:
            is_cut = ended.finish_reason == "length"
            status, reason = ("incomplete", {"reason": "max_output_tokens"}) if is_cut else ("completed", None)
        extra = self._asked.model_extra or {}
        return {
            "id": self.call.name,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "instructions": self._asked.instructions,
            "max_output_tokens": self._asked.max_output_tokens,
            "metadata": extra.get("metadata") or {},
            "model": self.model,
            "output": [] if ended is None else self._output(status),
            "parallel_tool_calls": self._asked.parallel_tool_calls is not False,
            "previous_response_id": self._asked.previous_response_id,
            "reasoning": {"effort": self.request.reasoning_effort, "summary": None},
            "store": self._is_stored,
            "temperature": params.temperature,
            "text": {"format": (self._asked.text and self._asked.text.format) or PLAIN},
            "tool_choice": self._asked.tool_choice or "auto",
            "tools": self._asked.tools or [],
            "top_logprobs": self._asked.top_logprobs or 0,
            "top_p": 1.0 if params.top_p is None else params.top_p,
            "truncation": "disabled",
            "usage": None if ended is None else self._tokens(),
        }

    def _output(self, status: str) -> list[dict[str, Any]]:
        """All items; only the last may be incomplete."""
        last = len(self._items) - 1
        return [item.as_dict(status if at == last else "completed") for at, item in enumerate(self._items)]

    def _tokens(self) -> dict[str, Any]:
        usage = self._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _messages(items: Items) -> list[dict[str, Any]]:
    """Items as messages of a chat."""
    messages, is_call = list[dict[str, Any]](), False
    for at, item in enumerate(items):
        kind, was_call = item.get("type") or "message", is_call
        is_call = kind == "function_call"
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif is_call:
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if was_call:  # several at once are one message
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append({"role": "tool", **output})
        elif kind != "reasoning":  # what a model thought is no part of what it is told
            message = f"input[{at}] is an item of type {shown(kind)}, which is not served; leave it out"
            raise Refusal(message, param="input", code="unsupported_content")
    return messages
