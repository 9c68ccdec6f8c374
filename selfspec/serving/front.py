"""`Front`: the address of several replicas, before Ray Serve's proxy. No request that it took is lost without a word.

A request that no replica has read is sent again. One whose replica dies before its answer has begun goes to one other;
the text is the same. It may be what kills them, so where that one dies, too, it is an error. A stream that breaks ends
with an error event. Where no replica answers, it is 503 with Retry-After, in the API's shape.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from selfspec.serving.bodies import Json, event
from selfspec.serving.border import COUNTED, REPLICA_ID, bordered
from selfspec.serving.config import ServerConfig
from selfspec.serving.metrics import Metrics, joined
from selfspec.serving.refusal import Refusal

TRIES, FIRST_WAIT = 6, 0.1  # seconds before the second try, which double
MOST_LOST = 2  # replicas that may die with a request
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's and Anthropic's clients try again after other errors of a server
ENDS = [b"[DONE]"]  # in the last event of a stream
ENDS += [b'"type":"' + kind for kind in (b"error", b"message_stop", b"response.completed", b"response.incomplete")]
NOT_PASSED = ("connection", "content-length", "host", "keep-alive", "transfer-encoding")


class Front:
    """ASGI application.

    Args:
        upstream: the address of Ray Serve's proxy.
        metrics: what /metrics tells.
    """

    def __init__(self, upstream: str, metrics: Callable[[], bytes]) -> None:
        self._metrics = metrics
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.client = httpx.AsyncClient(base_url=upstream, timeout=None, limits=limits)
        """To be closed in the event loop that called the application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/metrics":
            text = await asyncio.to_thread(self._metrics)
            await Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        work = asyncio.create_task(self._answer(scope, body, receive, send))
        watch = asyncio.create_task(_left(receive))
        done, _ = await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        for one in {work, watch} - done:
            one.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)
        if work in done:
            work.result()

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        num_lost = 0
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(FIRST_WAIT * 2 ** (attempt - 1))
            try:
                if await self._tried(scope, body, send):
                    return
            except UNSENT:
                continue
            except httpx.TransportError:
                num_lost += 1
                if num_lost == MOST_LOST:
                    sentence = f"{MOST_LOST} replicas died with this request, before an answer; check what it asks for"
                    lost = Refusal(sentence, 500, code="replica_lost")
                    await Json(lost.body_for(scope["path"]), lost.status, NO_RETRY)(scope, receive, send)
                    return
        refusal = Refusal("no replica answers; try again later", 503, code="unavailable", retry_after=2)
        await Json(refusal.body_for(scope["path"]), refusal.status, refusal.headers)(scope, receive, send)

    async def _tried(self, scope: Scope, body: bytes, send: Send) -> bool:
        """Whether a replica answered; False: none has read the request.

        Raises:
            httpx.TransportError: it died before its answer began; or one of `UNSENT`.
        """
        headers = [(name, value) for name, value in scope["headers"] if name.decode() not in NOT_PASSED]
        url = httpx.URL(path=scope["path"], query=scope["query_string"])
        request = self.client.build_request(scope["method"], url, headers=headers, content=body)
        response = await self.client.send(request, stream=True)
        try:
            if response.status_code >= 500 and REPLICA_ID not in response.headers:  # Ray Serve's own
                if response.status_code == 503:
                    return False
                raise httpx.ReadError("the replica died")
            scope[COUNTED] = True
            start: Message = {"type": "http.response.start", "status": response.status_code}
            start["headers"] = [one for one in response.headers.raw if one[0].decode().lower() not in NOT_PASSED]
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                whole = b"".join([part async for part in response.aiter_raw()])
                await send(start)
                await send({"type": "http.response.body", "body": whole})
                return True
            parts = response.aiter_raw()
            last = await anext(parts)  # until then, another replica may answer
            await send(start)
            await send({"type": "http.response.body", "body": last, "more_body": True})
            async for part in _rest(parts, last, scope["path"]):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body"})
            return True
        except StopAsyncIteration as problem:
            raise httpx.ReadError("the stream ended before it began") from problem
        finally:
            await response.aclose()


async def _rest(parts: AsyncIterator[bytes], last: bytes, path: str) -> AsyncIterator[bytes]:
    """A stream after its first part; where it breaks, an error event in place of what is missing."""
    tail = last
    try:
        async for part in parts:
            tail = (tail + part)[-4096:]
            yield part
    except httpx.TransportError:
        tail = b""
    if not any(end in tail for end in ENDS):
        body = Refusal("the replica that wrote this answer is gone; ask again", 500, code="replica_lost").body_for(path)
        kind = {"type": "error"} if path.startswith("/v1/responses") else {}
        yield event(kind | body, "error" if kind or "type" in body else None)
        if "/completions" in path:
            yield b"data: [DONE]\n\n"


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextmanager
def fronted(
    upstream: str, config: ServerConfig, sockets: list[Any], told: Callable[[], dict[str, bytes]] = dict
) -> Iterator[None]:
    """A front that serves in a thread while the block runs; at its end, what it has begun is answered first.

    Args:
        told: what the /metrics of each replica tells.
    """
    options: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "lifespan": "off"}
    options["timeout_graceful_shutdown"] = int(config.request_timeout)
    metrics = Metrics(config.model)
    front = Front(upstream, lambda: joined(metrics.text(), told()))
    server = uvicorn.Server(uvicorn.Config(bordered(front, config, metrics), **options))

    async def served() -> None:
        async with front.client:
            await server.serve(sockets)

    thread = threading.Thread(target=lambda: asyncio.run(served()), name="selfspec-front", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(config.request_timeout)
