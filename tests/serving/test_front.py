"""The address of several replicas: what happens to requests whose replica dies, told by a scripted upstream."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import pytest
from httpx import ASGITransport

from selfspec.serving import front
from selfspec.serving.border import bordered
from selfspec.serving.config import ServerConfig
from selfspec.serving.metrics import Metrics
from selfspec.serving.run import bound
from tests.serving.server import PATIENCE

BODY = b'{"prompt":"x"}'
EVENT = b'data: {"choices":[]}\n\n'


def answer(status, body, *headers, length=None):
    head = [f"HTTP/1.1 {status} X", f"content-length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


JSON = ("content-type: application/json", "x-replica-id: a")
STREAM = ("content-type: text/event-stream", "x-replica-id: a")
OK, WHOLE = answer(200, b'{"text":"hi"}', *JSON), answer(200, EVENT + b"data: [DONE]\n\n", *STREAM)
DEAD, LOST = b"", answer(500, b"Internal Server Error", "content-type: text/plain")
UNREAD = answer(503, b"Request dropped due to backpressure", "content-type: text/plain")
BREAKS, NEVER_BEGINS = answer(200, EVENT, *STREAM, length=999), answer(200, b"", *STREAM, length=999)
HALF = answer(200, b'{"te', *JSON, length=13)


@contextmanager
def asked(path, *answers, metrics=dict, method="POST", headers=None, **config):
    """A client of a front whose upstream gives these answers, one a connection; and what was asked of the upstream."""
    seen, upstream = [], socket.create_server(("127.0.0.1", 0))

    def serve():
        for one in answers:
            try:
                connection, _ = upstream.accept()
            except OSError:
                return
            with connection:
                got = b""
                while not got.endswith(BODY):
                    got += connection.recv(1 << 16)
                seen.append(got)
                connection.sendall(one)

    thread = threading.Thread(target=serve)
    thread.start()
    with bound("127.0.0.1", 0) as at:
        url = f"http://127.0.0.1:{at.getsockname()[1]}"
        inner = f"http://127.0.0.1:{upstream.getsockname()[1]}"
        with front.fronted(inner, ServerConfig(**config), [at], metrics), httpx.Client(timeout=PATIENCE) as client:
            for _ in range(200):
                try:
                    told = client.request(method, url + path, content=BODY, headers=headers or {"x-session-id": "s"})
                    break
                except httpx.ConnectError:
                    threading.Event().wait(0.05)
    with suppress(OSError):  # an answer that nobody asked for is waited for no longer
        upstream.shutdown(socket.SHUT_RDWR)
    upstream.close()
    thread.join(PATIENCE)
    yield told, seen


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(front, "FIRST_WAIT", 0.001)


@pytest.mark.parametrize("first", [[], [DEAD], [LOST], [HALF], [NEVER_BEGINS], [UNREAD] * 5, [UNREAD, DEAD, UNREAD]])
@pytest.mark.parametrize(("last", "body"), [(OK, b'{"text":"hi"}'), (WHOLE, EVENT + b"data: [DONE]\n\n")])
def test_what_has_not_begun_is_asked_again(first, last, body):
    with asked("/v1/completions", *first, last) as (told, seen):
        assert (told.status_code, told.content) == (200, body)
        assert told.headers["x-replica-id"] == "a" and len(told.headers["x-request-id"]) == 32
        assert len(seen) == len(first) + 1
        assert all(b"x-session-id: s" in one for one in seen)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/chat/completions", [b'"code":"replica_lost"', b"data: [DONE]\n\n"]),
        ("/v1/messages", [b"event: error\n", b'{"type":"error","error":{"type":"api_error"']),
        ("/v1/responses", [b"event: error\n", b'"type":"error"']),
    ],
)
def test_a_stream_that_breaks_ends_with_an_error_event(path, words):
    with asked(path, BREAKS) as (told, _):
        assert told.status_code == 200 and told.content.startswith(EVENT)
        assert all(word in told.content[len(EVENT) :] for word in words)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_where_no_replica_answers_it_says_when_to_come_back(path):
    with asked(path, *[UNREAD] * front.TRIES) as (told, seen):
        assert told.status_code == 503 and told.headers["retry-after"] == "2" and len(seen) == front.TRIES
        assert "no replica answers" in told.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("deaths", [[DEAD, LOST], [UNREAD, HALF, UNREAD, NEVER_BEGINS]])
def test_a_request_that_kills_replicas_kills_two_at_most(path, deaths):
    """Its clients are told not to send it again."""
    with asked(path, *deaths, OK) as (told, seen):
        assert told.status_code == 500 and len(seen) == len(deaths) and told.headers["x-should-retry"] == "false"
        assert "2 replicas died with this request" in told.json()["error"]["message"]


def test_where_nobody_listens_it_is_asked_again(monkeypatch):
    """As while Ray Serve's proxy starts anew: no try counts as a death."""
    tries = []

    async def refused(self, request, **options):
        tries.append(request)
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx.AsyncClient, "send", refused)
    with asked("/v1/completions") as (told, seen):
        assert told.status_code == 503 and len(tries) == front.TRIES and not seen


def test_answers_are_counted_by_those_that_give_them(monkeypatch):
    counted = []
    monkeypatch.setattr(Metrics, "answered", lambda self, method, handler, status, seconds: counted.append(status))
    for answers in ([OK], [UNREAD] * front.TRIES, [LOST] * 2):
        with asked("/v1/completions", *answers):
            pass
    assert counted == [503, 500]


def test_a_replicas_own_errors_are_passed_on():
    own = answer(500, b'{"error":{}}', *JSON)
    with asked("/v1/completions", own) as (told, seen):
        assert (told.status_code, told.json(), len(seen)) == (500, {"error": {}}, 1)


def test_a_large_body_and_a_wrong_key_go_no_further():
    with asked("/v1/completions", max_body_bytes=5) as (told, seen):
        assert told.status_code == 413 and not seen
    with asked("/v1/completions", api_key="k") as (told, seen):
        assert told.status_code == 401 and not seen


def test_preflights_of_browsers_need_no_key_and_go_no_further():
    ask = {"origin": "https://example.org", "access-control-request-method": "POST"}
    site = {"allowed_origins": ["https://example.org"], "api_key": "k"}
    with asked("/v1/completions", method="OPTIONS", headers=ask, **site) as (told, seen):
        assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, "https://example.org")
        assert not seen
    with asked("/v1/completions", headers=ask, **site) as (told, _):
        assert (told.status_code, told.headers["access-control-allow-origin"]) == (401, "https://example.org")


def test_what_a_replica_raises_is_its_own_500_once():
    """The front asks nobody else: a request that reached an engine would fail there, too."""

    async def raises(scope, receive, send):
        raise ZeroDivisionError

    config = ServerConfig(access_log=False)
    replica = ASGITransport(bordered(raises, config, Metrics("m"), "a"))

    async def scene():
        async with httpx.AsyncClient(transport=replica, base_url="http://replica") as client:
            return await client.post("/v1/completions", content=BODY)

    told = asyncio.run(scene())
    headers = [f"{name}: {value}" for name, value in told.headers.items() if name != "content-length"]
    with asked("/v1/completions", answer(told.status_code, told.content, *headers)) as (passed, seen):
        assert (passed.status_code, passed.json()["error"]["message"]) == (500, "the server failed")
        assert passed.headers["x-replica-id"] == "a" and len(seen) == 1


def test_a_front_that_ends_leaves_no_connection_open():
    with socket.create_server(("127.0.0.1", 0)) as upstream, bound("127.0.0.1", 0) as at:
        url, inner = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in (at, upstream))
        with front.fronted(inner, ServerConfig(access_log=False), [at]), ThreadPoolExecutor() as pool:
            told = pool.submit(httpx.post, url + "/v1/completions", content=BODY, timeout=PATIENCE)
            connection, _ = upstream.accept()
            connection.settimeout(PATIENCE)
            connection.sendall(OK)
            assert told.result().status_code == 200
        with connection:
            while connection.recv(1 << 16):
                pass


def test_half_a_body_of_a_client_that_leaves_is_passed_on_to_nobody():
    received = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    scope, sent = {"type": "http", "path": "/", "method": "POST", "headers": [], "query_string": b""}, []

    async def scene():
        async def receive():
            return next(received)

        async def send(message):
            sent.append(message)

        await front.Front("http://127.0.0.1:1", bytes)(scope, receive, send)

    asyncio.run(scene())
    assert not sent


def test_metrics_are_those_of_every_replica():
    def told():
        made = {name: Metrics("m") for name in ("a", "b")}
        for number, one in enumerate(made.values(), 1):
            one.reject("queue_full")
            one.answered("POST", "/v1/completions", 200, float(number))
        return {name: one.text() for name, one in made.items()}

    with asked("/metrics", metrics=told) as (answer, seen):
        text = answer.text
    assert answer.status_code == 200 and not seen and answer.headers["content-type"].startswith("text/plain")
    for name in "ab":
        assert f'vllm:admission_rejections_total{{model_name="m",reason="queue_full",replica="{name}"}} 1.0' in text
    assert text.count("# TYPE vllm:admission_rejections_total counter") == 1
    assert text.count('http_requests_total{handler="/v1/completions",method="POST",replica="') == 2
    assert text.count("vllm:num_requests_running{") == 2
