"""`Border`: what every request passes: API key, size of its body, and its id, which the answer bears, too."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from selfspec.serving.bodies import Json
from selfspec.serving.config import ServerConfig
from selfspec.serving.refusal import Refusal

GUARDED = "/v1/"
REQUEST_ID = "x-request-id"


class Border:
    """ASGI middleware. It passes messages on as they are, so that nothing is held up and disconnects are seen.

    Args:
        app: what is behind it.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        own = headers.get(REQUEST_ID)
        answer = send if own is None else _marked(send, own)
        refusal = self._refusal(scope["path"], headers)
        if refusal is None:
            await self._app(scope, _limited(receive, self._config.max_body_bytes), answer)
        else:
            await Json(refusal.body, refusal.status, refusal.headers)(scope, receive, answer)

    def _refusal(self, path: str, headers: Headers) -> Refusal | None:
        key = self._config.api_key
        if key is not None and path.startswith(GUARDED):
            given = headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                return Refusal("the API key is missing or wrong", 401, code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._config.max_body_bytes:
            return _too_large(self._config.max_body_bytes)
        return None


def _marked(send: Send, request_id: str) -> Send:
    """The same messages: the answer bears the request's id."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)[REQUEST_ID] = request_id
        await send(message)

    return marked


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
