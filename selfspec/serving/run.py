"""`run`: the application behind uvicorn, which a signal drains and ends."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn

from selfspec.llm import LLM
from selfspec.serving.admission import Dispatcher
from selfspec.serving.app import create_app
from selfspec.serving.config import ServerConfig

SECONDS_TO_SEND = 5  # that connections have for what is left of their answers, once no request runs


class DrainingServer(uvicorn.Server):
    """Told to stop, it refuses new requests with 503 until those that run have ended or met the deadline.

    A second signal ends it at once. It starts and stops the engine itself, so that an error there comes out of `run`.

    Args:
        seconds: of the deadline.
        ready: is called when it listens.
    """

    def __init__(
        self, config: uvicorn.Config, dispatcher: Dispatcher, seconds: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._dispatcher, self._seconds, self._ready = dispatcher, seconds, ready
        self._stops_at: float | None = None
        self.signal: int | None = None
        """The first signal that it got."""

    async def startup(self, sockets: Any = None) -> None:
        await self._dispatcher.start()
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        await self._dispatcher.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.should_exit = self.force_exit = True
            return
        self.signal = sig
        self._stops_at = monotonic() + self._seconds
        self._dispatcher.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._stops_at is not None and (self._dispatcher.num_open == 0 or monotonic() >= self._stops_at):
            self.should_exit = True
        return await super().on_tick(counter)


def run(llm: LLM, config: ServerConfig, host: str, port: int, say: Callable[[str], None] = print) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        port: 0 takes a free one.
        say: is given a line when the server listens.

    Raises:
        KeyboardInterrupt: Ctrl-C ended it.
        ValueError: host and port cannot be listened at; or what `LLM.engine` raises.
    """
    listening = _bound(host, port)
    app = create_app(llm, config)
    options: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "lifespan": "off"}
    settings = uvicorn.Config(app, timeout_graceful_shutdown=SECONDS_TO_SEND, **options)
    where = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    ready = f"serving {config.model} at {where}"
    server = DrainingServer(settings, app.state.server.dispatcher, config.request_timeout, lambda: say(ready))
    try:
        server.run([listening])
    finally:
        listening.close()
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt


def _bound(host: str, port: int) -> socket.socket:
    """A socket at that address; it does not listen yet, so that nobody connects before the engine is there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as problem:
        raise ValueError(
            f"host and port must be free and this machine's, got {host} and {port} ({problem.strerror}); choose others"
        ) from problem
    return made
