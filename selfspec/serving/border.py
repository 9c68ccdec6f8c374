"""`bordered`: what every request passes: origin, key, size of its body, id, and the count and log of answers."""

from __future__ import annotations

import hmac
import logging
import re
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.serving.bodies import Json
from selfspec.serving.config import ServerConfig
from selfspec.serving.metrics import Metrics
from selfspec.serving.refusal import ANTHROPIC, Refusal

_log = logging.getLogger("selfspec.serving")
_access = logging.getLogger("selfspec.serving.access")
OPEN = ("/health", "/metrics", "/version", "/ping")  # which need no key
COUNTED = "selfspec.counted"  # in a scope: another process counts this answer
OF_V1 = ("chat", "completions", "messages", "models", "responses")  # first parts of paths behind /v1
REQUEST_ID = "x-request-id"
REPLICA_ID = "x-replica-id"  # header of answers; what has none is no replica's answer
GONE = 499  # the status of requests whose clients left before an answer began


def bordered(app: ASGIApp, config: ServerConfig, metrics: Metrics, replica: str | None = None) -> ASGIApp:
    """An application behind its border. Preflights of browsers, which bear no key, are answered before it."""
    border = Border(app, config, metrics, replica)
    if not config.allowed_origins:
        return border
    wide: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": [REQUEST_ID]}
    return CORSMiddleware(border, allow_origins=[*config.allowed_origins], **wide)


class Border:
    """ASGI middleware. It passes messages on as they are, so that nothing is held up and disconnects are seen. What the
    application raises before its answer begins is logged, and answered with 500.

    Args:
        app: what is behind it.
        metrics: counts the answers.
        replica: the name of the replica that it is, which its answers bear.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics, replica: str | None = None) -> None:
        self._app, self._config, self._metrics = app, config, metrics
        self._marks = {} if replica is None else {REPLICA_ID: replica}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _usual(scope)
        headers, start, status = Headers(scope=scope), perf_counter(), GONE
        request_id = headers.get(REQUEST_ID) or uuid4().hex

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(self._marks | {REQUEST_ID: request_id})
            await send(message)

        refusal = self._refusal(scope["path"], headers)
        try:
            if refusal is None:
                try:
                    await self._app(scope, _limited(receive, self._config.max_body_bytes), marked)
                except HTTPException as problem:  # of the body, where what is behind does not answer it
                    refusal = Refusal(problem.detail, problem.status_code)
                except Exception:
                    if status != GONE:
                        raise
                    _log.exception("%s %s failed", scope["method"], scope["path"])
                    refusal = Refusal("the server failed", 500)
            if refusal is not None:
                body = refusal.body_for(scope["path"])
                await Json(body, refusal.status, refusal.headers)(scope, receive, marked)
        finally:
            self._told(scope, status, perf_counter() - start, request_id)

    def _told(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        """Count an answer, and write a line of it."""
        handler = getattr(scope.get("route"), "path", "none")  # not the path: anybody can make paths up
        if COUNTED not in scope:
            self._metrics.answered(scope["method"], handler, status, seconds)
        if self._config.access_log and scope["path"] not in OPEN:
            where, own = scope.get("client") or ("-",), (scope["method"], scope["path"], status)
            _access.info("%s %s %s %d %.3fs %s", where[0], *own, seconds, request_id)

    def _refusal(self, path: str, headers: Headers) -> Refusal | None:
        keys = self._config.api_keys
        if keys and path not in OPEN and not self._is_known(path, headers, keys):
            return Refusal("the API key is missing or wrong", 401, code="invalid_api_key")
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            return Refusal(f"the body must be sent without Content-Encoding, got {coding}", 415)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._config.max_body_bytes:
            return _too_large(self._config.max_body_bytes)
        return None

    def _is_known(self, path: str, headers: Headers, keys: tuple[str, ...]) -> bool:
        """Whether a request has one of the keys; all are compared, so that time tells nothing."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        sent = [given.strip()] if scheme.lower() == "bearer" else []
        sent += [headers.get("x-api-key", "")] if path.startswith(ANTHROPIC) else []
        same = [hmac.compare_digest(one.encode(), key.encode()) for one in sent for key in keys]
        return any(same)


def _usual(scope: Scope) -> Scope:
    """A request as the routes know it: HEAD is GET, whose body the HTTP server leaves out; /v1 may be left out, and
    slashes may be too many."""
    path = re.sub("/{2,}", "/", scope["path"]).rstrip("/") or "/"
    path = f"/v1{path}" if path.split("/")[1] in OF_V1 else path
    return {**scope, "path": path, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}


def _limited(receive: Receive, most: int) -> Receive:
    """The same messages, as long as their bodies come to no more bytes."""
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > most:
            raise HTTPException(413, _too_large(most).message)
        return message

    return limited


def _too_large(most: int) -> Refusal:
    return Refusal(f"the body must have at most {most} bytes", 413)
