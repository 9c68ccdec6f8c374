"""`create_app`: the FastAPI application of one `LLM`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import selfspec
from selfspec.llm import LLM
from selfspec.serving.bodies import Json
from selfspec.serving.border import bordered
from selfspec.serving.config import ServerConfig
from selfspec.serving.protocol import SHAPES
from selfspec.serving.refusal import Refusal, invalid
from selfspec.serving.server import Server

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


def create_app(llm: LLM, config: ServerConfig | None = None, replica: str | None = None) -> FastAPI:
    """The application. The engine is made when it starts and ends when it stops (ASGI lifespan); until then nothing
    happens. `app.state.server` is its `Server`, and `replica` a name that its answers bear.
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
    app.add_middleware(bordered, config=server.config, metrics=server.metrics, replica=replica)
    _add_errors(app)
    _add_routes(app, server)
    return app


def _add_routes(app: FastAPI, server: Server) -> None:
    info = server.info
    routes: list[tuple[str, str, Callable[..., Any]]] = [
        ("POST", "/v1/completions", server.complete),
        ("POST", "/v1/chat/completions", server.chat),
        ("POST", "/v1/responses", server.respond),
        ("GET", "/v1/responses/{name}", server.response),
        ("DELETE", "/v1/responses/{name}", server.delete_response),
        ("POST", "/v1/messages", server.message),
        ("POST", "/v1/messages/count_tokens", server.count),
        ("GET", "/v1/models", info.models),
        ("GET", "/v1/models/{name:path}", info.model),
        ("POST", "/tokenize", server.tokenize),
        ("POST", "/detokenize", server.detokenize),
        ("GET", "/tokenizer_info", info.tokenizer_info),
        ("GET", "/props", info.props),
        ("GET", "/slots", info.slots),
        ("GET", "/load", info.load),
        ("GET", "/health", info.health),
        ("GET", "/ping", info.health),
        ("POST", "/ping", info.health),
        ("GET", "/metrics", info.metrics),
        ("GET", "/version", info.version),
    ]
    for method, path, answer in routes:
        app.add_api_route(path, answer, methods=[method], responses=ERRORS)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, problem: Refusal) -> Response:
        return Json(problem.body_for(request.url.path), problem.status, problem.headers)

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, problem: RequestValidationError) -> Response:
        return await refused(request, invalid(problem.errors(), SHAPES))

    @app.exception_handler(HTTPException)
    async def failed(request: Request, problem: HTTPException) -> Response:
        message, code = str(problem.detail), None
        if problem.status_code in (404, 405):
            message = f"{message}: {request.method} {request.url.path} is no route of this server; see /openapi.json"
            code = "unknown_url"
        refusal = Refusal(message, problem.status_code, code=code)
        return Json(refusal.body_for(request.url.path), refusal.status, problem.headers)
