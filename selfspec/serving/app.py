"""`create_app`: the FastAPI application of one `LLM`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import selfspec
from selfspec.llm import LLM
from selfspec.serving.bodies import Json
from selfspec.serving.border import REQUEST_ID, Border
from selfspec.serving.config import ServerConfig
from selfspec.serving.messages import MessagesRequest
from selfspec.serving.protocol import SHAPES, ChatRequest, CompletionRequest
from selfspec.serving.refusal import Refusal, invalid
from selfspec.serving.responses import ResponsesRequest
from selfspec.serving.server import Server
from selfspec.serving.tokenizing import DetokenizeRequest, TokenizeRequest

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "a field that is wrong, or is not served"},
    401: {"description": "no API key, or a wrong one"},
    404: {"description": "no such model"},
    413: {"description": "the body is too large"},
    429: {"description": "too many requests wait; Retry-After says when to come back"},
    500: {"description": "the request failed"},
    503: {"description": "the server shuts down, or its engine has stopped"},
    504: {"description": "the request took longer than the server allows"},
}


def create_app(llm: LLM, config: ServerConfig | None = None) -> FastAPI:
    """The application. The engine is made when it starts and ends when it stops (ASGI lifespan); until then nothing
    happens. `app.state.server` is its `Server`.
    """
    server = Server(llm, config or ServerConfig())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.start()
        try:
            yield
        finally:
            await server.dispatcher.stop()

    app = FastAPI(title="selfspec", version=selfspec.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    app.add_middleware(Border, config=server.config, metrics=server.metrics)
    if server.config.allowed_origins:
        wide: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": [REQUEST_ID]}
        app.add_middleware(CORSMiddleware, allow_origins=[*server.config.allowed_origins], **wide)
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

    @app.post("/v1/responses", responses=ERRORS)
    async def responses(asked: ResponsesRequest) -> Response:
        return await server.respond(asked)

    @app.get("/v1/responses/{name}", responses=ERRORS)
    async def response(name: str) -> Response:
        return Json(server.responses.get(name).response)

    @app.delete("/v1/responses/{name}", responses=ERRORS)
    async def delete_response(name: str) -> Response:
        server.responses.delete(name)
        return Json({"id": name, "object": "response", "deleted": True})

    @app.post("/v1/messages", responses=ERRORS)
    async def messages(asked: MessagesRequest) -> Response:
        return await server.message(asked)

    @app.post("/v1/messages/count_tokens", responses=ERRORS)
    async def count_tokens(asked: MessagesRequest) -> Response:
        return await server.count(asked)

    @app.get("/v1/models", responses={401: ERRORS[401]})
    async def models() -> Response:
        return Json({"object": "list", "data": [server.about(name) for name in server.names]})

    @app.get("/v1/models/{name:path}", responses={401: ERRORS[401], 404: ERRORS[404]})
    async def model(name: str) -> Response:
        return Json(server.about(server.model(name)))

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(asked: TokenizeRequest) -> Response:
        return await server.tokenize(asked)

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(asked: DetokenizeRequest) -> Response:
        return server.detokenize(asked)

    @app.get("/tokenizer_info", responses={401: ERRORS[401], 404: ERRORS[404]})
    async def tokenizer_info() -> Response:
        return server.about_tokenizer()

    @app.get("/health", responses={503: ERRORS[503]})
    async def health() -> Response:
        return Response(status_code=200 if server.dispatcher.is_healthy else 503)

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Response:
        return await health()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> Response:
        return Json({"version": selfspec.__version__})


def _add_errors(app: FastAPI) -> None:
    def answer(request: Request, refusal: Refusal) -> Response:
        return Json(refusal.body_for(request.url.path), refusal.status, refusal.headers)

    @app.exception_handler(Refusal)
    async def refused(request: Request, problem: Refusal) -> Response:
        return answer(request, problem)

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, problem: RequestValidationError) -> Response:
        return answer(request, invalid(problem.errors(), SHAPES))

    @app.exception_handler(HTTPException)
    async def failed(request: Request, problem: HTTPException) -> Response:
        message, code = str(problem.detail), None
        if problem.status_code in (404, 405):
            message = f"{message}: {request.method} {request.url.path} is no route of this server; see /openapi.json"
            code = "unknown_url"
        refusal = Refusal(message, problem.status_code, code=code)
        return Json(refusal.body_for(request.url.path), refusal.status, problem.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, problem: Exception) -> Response:
        return answer(request, Refusal("the server failed", 500))
