"""`create_app`: the FastAPI application of one `LLM`."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import time
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import selfspec
from selfspec.llm import LLM
from selfspec.serving.admission import Dispatcher
from selfspec.serving.bodies import ChatWriter, CompletionWriter, Json, Writer
from selfspec.serving.border import Border
from selfspec.serving.calls import Call
from selfspec.serving.config import ServerConfig
from selfspec.serving.loop import refusal_of
from selfspec.serving.metrics import Metrics
from selfspec.serving.protocol import (
    CHAT_TOKENS,
    COMPLETION_TOKENS,
    MOST_PARTS,
    MOST_STOPS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Refusal,
)  # fmt: skip
from selfspec.serving.tokens import Reader

_log = logging.getLogger("selfspec.serving")
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "a field that is wrong, or is not served"},
    401: {"description": "no API key, or a wrong one"},
    413: {"description": "the body is too large"},
    429: {"description": "too many requests wait; Retry-After says when to come back"},
    500: {"description": "the request failed"},
    503: {"description": "the server shuts down, or its engine has stopped"},
    504: {"description": "the request took longer than the server allows"},
}
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

SHAPES = {  # of fields that may have several, of which pydantic would name the first
    "prompt": f"a text, a list of at most {MOST_PARTS} texts, a list of token ids, or a list of those",
    "stop": f"a text, or a list of at most {MOST_STOPS} texts",
}


class Answer(Response):
    """What comes of a call, whole or as server-sent events. The call ends with it, whatever ends it: the client's going
    away, too, which is noticed at once.
    """

    def __init__(self, writer: Writer, dispatcher: Dispatcher) -> None:
        super().__init__()
        self._writer, self._call, self._dispatcher = writer, writer.call, dispatcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._dispatcher.submit(self._call)
        watch = asyncio.create_task(self._watch(receive))
        try:
            if self._call.streams:
                await self._call.accepted()
                await self._stream(send)
            else:
                await self._call.ended()
                await Json(self._writer.body())(scope, receive, send)
        finally:
            watch.cancel()
            self._dispatcher.end(self._call)

    async def _stream(self, send: Send) -> None:
        headers = [*STREAM_HEADERS]  # middleware may add to them
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for events in self._writer.events():
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body"})

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._dispatcher.end(self._call)
        self._call.fail(Refusal("the client has gone", 499))


class Server:
    """What the routes do."""

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.config, self.metrics, self.created = config, Metrics(config.model), int(time())
        self.dispatcher = Dispatcher(llm, config, self.metrics)
        self._reader = Reader(llm)
        self._vocab_size = llm.target.split.vocab_size
        self.context_limit = llm.target.split.context_limit

    async def complete(self, asked: CompletionRequest) -> Response:
        """`/v1/completions`."""
        self._check(asked)
        if asked.stream and asked.echo and asked.logprobs is not None:
            raise Refusal("echo with logprobs cannot be streamed; leave stream out", param="stream")
        self.dispatcher.refuse_too_many(len(asked.prompts), asked.n or 1)
        prompts = await self._reader.prompts(asked.prompts)
        length = COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        scored = asked.logprobs if asked.echo else None
        call = self._call("cmpl", asked, prompts, max(length, int(length == 0)), length == 0, prompt_logprobs=scored)
        texts = await self._reader.texts(asked.prompts) if asked.echo else []
        writer = CompletionWriter(asked, call, self.config.model, texts, self._reader.tokenizer)
        return Answer(writer, self.dispatcher)

    async def chat(self, asked: ChatRequest) -> Response:
        """`/v1/chat/completions`."""
        self._check(asked)
        self.dispatcher.refuse_too_many(1, asked.n or 1)
        prompt = await self._reader.chat(asked)
        length = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        if length is None:
            length = max(1, min(CHAT_TOKENS, self.dispatcher.capacity - len(prompt), self.context_limit - len(prompt)))
        call = self._call("chatcmpl", asked, [prompt], length, False)
        return Answer(ChatWriter(asked, call, self.config.model), self.dispatcher)

    def _check(self, asked: GenerationRequest) -> None:
        if asked.model is not None and asked.model != self.config.model:
            message = f"there is no model {asked.model!r} here; this server has {self.config.model!r}"
            raise Refusal(message, 404, param="model", code="model_not_found")
        asked.refuse_unserved()

    def _call(
        self,
        kind: str,
        asked: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        length: int,
        drops_output: bool,
        **more: Any,
    ) -> Call:
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        try:
            params = asked.params(seed, length, self._vocab_size, **more)
        except ValueError as problem:
            raise refusal_of(problem) from problem
        name, seconds = f"{kind}-{uuid4().hex}", self.config.request_timeout
        call = Call(name, prompts, params, seconds, drops_output, streams=bool(asked.stream))
        if self.config.log_prompts:
            _log.info("%s: %s", call.name, asked.model_dump_json(exclude_none=True))
        return call


def create_app(llm: LLM, config: ServerConfig | None = None) -> FastAPI:
    """The application. The engine is made when it starts and ends when it stops (ASGI lifespan); until then nothing
    happens. `app.state.server` is its `Server`.
    """
    server = Server(llm, config or ServerConfig())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.dispatcher.start()
        try:
            yield
        finally:
            await server.dispatcher.stop()

    app = FastAPI(title="selfspec", version=selfspec.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    app.add_middleware(Border, config=server.config)
    _add_errors(app)
    _add_routes(app, server)
    return app


def _add_routes(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", responses=ERRORS)
    async def completions(asked: CompletionRequest) -> Response:
        return await server.complete(asked)

    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat_completions(asked: ChatRequest) -> Response:
        return await server.chat(asked)

    @app.get("/v1/models", responses={401: ERRORS[401]})
    async def models() -> Response:
        own = {"id": server.config.model, "object": "model", "created": server.created, "owned_by": "selfspec"}
        return Json({"object": "list", "data": [own | {"max_model_len": server.context_limit}]})

    @app.get("/health", responses={503: ERRORS[503]})
    async def health() -> Response:
        return Response(status_code=200 if server.dispatcher.is_healthy else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> Response:
        return Json({"version": selfspec.__version__})


def _add_errors(app: FastAPI) -> None:
    def answer(refusal: Refusal) -> Response:
        return Json(refusal.body, refusal.status, refusal.headers)

    @app.exception_handler(Refusal)
    async def refused(request: Request, problem: Refusal) -> Response:
        return answer(problem)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, problem: RequestValidationError) -> Response:
        first = problem.errors()[0]
        where = [str(part) for part in first["loc"][1:]]
        name = where[0] if where and first["type"] != "json_invalid" else None
        message = str(first["msg"])
        if name is None:
            message = "the body must be valid JSON, an object, sent with Content-Type: application/json"
        if name in SHAPES and first["type"] != "missing":
            where, message = [name], f"must be {SHAPES[name]}"
        return answer(Refusal(message if name is None else f"{'.'.join(where)}: {message}", param=name))

    @app.exception_handler(HTTPException)
    async def failed(request: Request, problem: HTTPException) -> Response:
        return Json(Refusal(str(problem.detail), problem.status_code).body, problem.status_code, problem.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, problem: Exception) -> Response:
        return answer(Refusal("the server failed", 500))
