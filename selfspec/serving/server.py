"""`Server`: what the routes do. Every request becomes a `CompletionRequest` or a `ChatRequest`, and these a `Call`."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from selfspec.llm import LLM
from selfspec.serving.admission import Dispatcher
from selfspec.serving.bodies import ChatWriter, CompletionWriter, Json, Writer
from selfspec.serving.calls import Call
from selfspec.serving.config import ServerConfig
from selfspec.serving.fields import check_fields
from selfspec.serving.info import Info
from selfspec.serving.loop import refusal_of
from selfspec.serving.messages import MessagesRequest, MessagesWriter
from selfspec.serving.metrics import Metrics
from selfspec.serving.protocol import (
    CHAT_TOKENS,
    COMPLETION_TOKENS,
    NO_LIMIT,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    chat_request,
)
from selfspec.serving.refusal import Refusal
from selfspec.serving.responses import ResponsesRequest, ResponsesWriter
from selfspec.serving.store import ResponseStore
from selfspec.serving.structured import asking, refusal
from selfspec.serving.token_texts import TokenTexts
from selfspec.serving.tokenizing import DetokenizeRequest, TokenizeRequest
from selfspec.serving.tokens import Reader
from selfspec.structured.tool_calls import ToolGrammar, ToolUse

_log = logging.getLogger("selfspec.serving")


class Answer(StreamingResponse):
    """What comes of a call, whole or as server-sent events. The call ends with it, whatever ends it: the client's going
    away, too, which is noticed at once.
    """

    media_type = "text/event-stream"

    def __init__(self, writer: Writer, dispatcher: Dispatcher) -> None:
        super().__init__(writer.events(), headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._writer, self._call, self._dispatcher = writer, writer.call, dispatcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._dispatcher.submit(self._call)
        watch = asyncio.create_task(self._watch(receive))
        try:
            if self._call.streams:
                await self._call.accepted()
                await self.stream_response(send)
            else:
                await self._call.ended()
                await Json(self._writer.body())(scope, receive, send)
        finally:
            watch.cancel()
            self._dispatcher.end(self._call)

    async def _watch(self, receive: Receive) -> None:
        await self.listen_for_disconnect(receive)
        self._dispatcher.end(self._call)
        self._call.fail(Refusal("the client has gone", 499))


class Server:
    """What the routes do."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.config, self.metrics = config, Metrics(config.model)
        self.dispatcher = Dispatcher(llm, config, self.metrics)
        self.reader = Reader(llm, template_of(config.chat_template), config.tool_call_parser)
        self.info = Info(config, self.metrics, self.dispatcher, self.reader)
        self.tokens = TokenTexts(llm.tokenizer)
        self.responses = ResponseStore(config.max_stored_bytes)
        self._defaults, self._vocab_size = llm.target.defaults, llm.target.split.vocab_size

    async def start(self) -> None:
        """Make the engine.

        Raises:
            what `Dispatcher.start` raises.
        """
        await self.dispatcher.start()
        self.reader.max_model_len = self.dispatcher.max_model_len
        with suppress(Refusal):  # templates are compiled at their first use
            await self.reader.chat(chat_request({"messages": [{"role": "user", "content": "Hi"}]}))

    async def complete(self, asked: CompletionRequest) -> Response:
        """`/v1/completions`."""
        model = self.info.name(asked.model)
        asked.refuse_unserved()
        if asked.stream and asked.echo and asked.logprobs is not None:
            raise Refusal("echo with logprobs cannot be streamed; leave stream out", param="stream")
        self.dispatcher.refuse_too_many(len(asked.prompts), asked.n or 1)
        prompts = await self.reader.prompts(asked)
        length, reserve = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens, None
        if length == NO_LIMIT:
            length, reserve = self.reader.max_model_len, CHAT_TOKENS
        scored = {"prompt_logprobs": asked.logprobs} if asked.echo and asked.logprobs is not None else {}
        call = self._call("cmpl-", asked, prompts, length or 1, length == 0, reserve, **scored)
        await self._check_grammar(asked, call)
        texts = await self.reader.texts(asked, prompts) if asked.echo else []
        return Answer(CompletionWriter(asked, call, model, self.tokens, texts), self.dispatcher)

    async def chat(self, asked: ChatRequest) -> Response:
        """`/v1/chat/completions`."""
        model = self.info.name(asked.model)
        asked.refuse_unserved()
        call, use = await self._chat_call(asked, "chatcmpl-")
        return Answer(ChatWriter(asked, call, model, self.tokens, use), self.dispatcher)

    async def respond(self, asked: ResponsesRequest) -> Response:
        """`/v1/responses`."""
        model = self.info.name(asked.model)
        asked.refuse_unserved()
        before = self.responses.conversation(asked.previous_response_id)
        request = asked.as_chat(before)
        call, use = await self._chat_call(request, "resp_")
        writer = ResponsesWriter(asked, before, self.responses, request, call, model, self.tokens, use)
        return Answer(writer, self.dispatcher)

    async def response(self, name: str) -> Response:
        """GET of `/v1/responses/{id}`."""
        return Json(self.responses.get(name).response)

    async def delete_response(self, name: str) -> Response:
        """DELETE of `/v1/responses/{id}`."""
        self.responses.delete(name)
        return Json({"id": name, "object": "response", "deleted": True})

    async def message(self, asked: MessagesRequest) -> Response:
        """`/v1/messages`."""
        model = self.info.name(asked.model)
        asked.refuse_unserved()
        request = asked.as_chat()
        call, use = await self._chat_call(request, "msg_")
        return Answer(MessagesWriter(request, call, model, self.tokens, use), self.dispatcher)

    async def count(self, asked: MessagesRequest) -> Response:
        """`/v1/messages/count_tokens`."""
        self.info.name(asked.model)
        asked.refuse_unserved()
        request = asked.as_chat()
        return Json({"input_tokens": len(await self.reader.chat(request, await self.reader.tools(request)))})

    async def tokenize(self, asked: TokenizeRequest) -> Response:
        """`/tokenize`."""
        self.info.name(asked.model)
        check_fields(asked.model_extra or {})
        return Json(asked.answer(await asked.tokens(self.reader), self.reader, self.tokens))

    async def detokenize(self, asked: DetokenizeRequest) -> Response:
        """`/detokenize`."""
        self.info.name(asked.model)
        if any(token >= self._vocab_size for token in asked.tokens):
            raise Refusal(f"tokens must lie in 0..{self._vocab_size - 1}, the model's vocabulary", param="tokens")
        text = self.reader.text(asked.tokens)
        return Json({"prompt": text, "content": text})

    async def _chat_call(self, asked: ChatRequest, kind: str) -> tuple[Call, ToolUse | None]:
        """The call that answers a conversation, and how tools are called; `kind` is the first part of its name."""
        self.dispatcher.refuse_too_many(1, asked.n or 1)
        use = await self.reader.tools(asked)
        prompt = await self.reader.chat(asked, use)
        length = self.reader.max_model_len - len(prompt) if asked.length is None else asked.length
        expected = await self.reader.prediction(asked)
        reserve = CHAT_TOKENS if asked.length is None else None
        call = self._call(kind, asked, [prompt], length, False, reserve, prediction=expected or None)
        if use is not None:
            call.params = use.params(call.params)
        await self._check_grammar(asked, call)
        return call, use

    async def _check_grammar(self, asked: GenerationRequest, call: Call) -> None:
        """Compile the grammar of structured outputs in another thread, where the engine finds it.

        Raises:
            Refusal: it cannot be honoured.
        """
        wanted = call.params.structured_outputs
        if wanted is None:
            return
        eos = self._defaults.eos_token_ids
        is_tools = isinstance(wanted, ToolGrammar)
        call.grammar_field = "tools" if is_tools else asking(asked.shapes)
        try:
            await asyncio.to_thread(self._defaults.grammars.row, wanted, eos, self._vocab_size)
        except (ValueError, ImportError) as problem:
            if is_tools:
                raise Refusal(str(problem), param="tools") from problem
            raise refusal(str(problem), call.grammar_field) from problem

    def _call(
        self,
        kind: str,
        asked: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        length: int,
        drops_output: bool,
        reserve: int | None = None,
        **more: Any,
    ) -> Call:
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        if asked.temperature is None:
            more["temperature"] = self._temperature()
        try:
            params = asked.params(seed, length, self._vocab_size, **more)
        except ValueError as problem:
            raise refusal_of(problem) from problem
        name, limits = f"{kind}{uuid4().hex}", (self.reader.max_model_len, self.config.request_timeout)
        call = Call(name, prompts, params, *limits, drops_output, bool(asked.stream), reserve)
        if self.config.log_prompts:
            _log.info("%s: %s", call.name, asked.model_dump_json(exclude_none=True))
        return call

    def _temperature(self) -> float | None:
        """Of requests that name none: the generation config's (None), else 1, as OpenAI and vLLM have it."""
        own = self._defaults.config
        if getattr(own, "do_sample", None):
            return None
        told = getattr(own, "temperature", None)
        return 1.0 if told is None else float(told)


def template_of(given: str | None) -> str | None:
    """A chat template, which is given as a text or as the name of a file.

    Raises:
        ValueError: it is neither.
    """
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(f"chat_template must be a Jinja template or a file that holds one, got {given!r}") from problem
