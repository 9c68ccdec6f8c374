"""OpenAI's /v1/responses: its requests as `ChatRequest`s, and its answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from selfspec.serving.bodies import ChatWriter, event
from selfspec.serving.calls import Call, Choice
from selfspec.serving.fields import check_fields
from selfspec.serving.protocol import Body, ChatRequest, GenerationRequest, translated
from selfspec.serving.refusal import Refusal, shown
from selfspec.serving.store import Items, ResponseStore
from selfspec.serving.token_texts import TokenTexts

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
        return translated(self, more | {"reasoning_effort": self.reasoning and self.reasoning.effort})


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
    ) -> None:
        super().__init__(request, call, model, tokens)
        self._before, self._store = before, store
        self._asked, self._item = asked, call.name.replace("resp", "msg", 1)
        self._written, self._told = "", list[dict[str, Any]]()

    def body(self) -> dict[str, Any]:
        [choice] = self.call.choices
        self._take(choice)
        return self._ended(choice)

    async def events(self) -> AsyncIterator[bytes]:
        number, place = iter(range(1 << 62)), {"item_id": self._item, "output_index": 0, "content_index": 0}

        def told(kind: str, **more: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(number), **more}, kind)

        item = self._message("in_progress") | {"content": []}
        yield told("response.created", response=self._response(None))
        yield told("response.in_progress", response=self._response(None))
        yield told("response.output_item.added", output_index=0, item=item)
        yield told("response.content_part.added", **place, part=self._part())
        last = self.call.choices[0]
        try:
            async for [piece] in self.call.changes():
                known, last = len(self._told), piece
                self._take(piece)
                more = {"delta": piece.text, "logprobs": self._told[known:]}
                yield told("response.output_text.delta", **place, **more)
        except Refusal as problem:
            yield told("error", code=problem.code, message=problem.message, param=problem.param)
            return
        yield told("response.output_text.done", **place, text=self._written, logprobs=self._told)
        yield told("response.content_part.done", **place, part=self._part())
        response = self._ended(last)
        yield told("response.output_item.done", output_index=0, item=response["output"][0])
        yield told(f"response.{response['status']}", response=response)

    def _ended(self, last: Choice) -> dict[str, Any]:
        """The whole response, which is stored."""
        response = self._response(last)
        if self._is_stored:
            self._store.keep(response, [*self._before, *self._asked.items])
        return response

    @property
    def _is_stored(self) -> bool:
        return self._asked.store is not False and self._store.keeps

    def _take(self, piece: Choice) -> None:
        self._written += piece.text
        self._told += [] if piece.logprobs is None else self.logprobs(piece)

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._written, "annotations": [], "logprobs": self._told}

    def _message(self, status: str) -> dict[str, Any]:
        return {"id": self._item, "type": "message", "status": status, "role": "assistant", "content": [self._part()]}

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
            "output": [] if ended is None else [self._message(status)],
            "parallel_tool_calls": extra.get("parallel_tool_calls") is not False,
            "previous_response_id": self._asked.previous_response_id,
            "reasoning": {"effort": self.request.reasoning_effort, "summary": None},
            "store": self._is_stored,
            "temperature": params.temperature,
            "text": {"format": (self._asked.text and self._asked.text.format) or PLAIN},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": self._asked.top_logprobs or 0,
            "top_p": 1.0 if params.top_p is None else params.top_p,
            "truncation": "disabled",
            "usage": None if ended is None else self._tokens(),
        }

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
