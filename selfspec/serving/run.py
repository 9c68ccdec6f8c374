"""`DrainingServer`: the application behind uvicorn, which a signal drains and ends."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn

from selfspec.llm import LLM
from selfspec.serving.app import create_app
from selfspec.serving.config import ServerConfig
from selfspec.serving.server import Server

SECONDS_IDLE = 75  # before a connection without a request is closed; clients close theirs sooner (httpx after 5 s)
SECONDS_TO_SEND = 5  # that connections have for what is left of their answers, once no request runs


class DrainingServer(uvicorn.Server):
    """The application behind a socket. It starts and stops the engine itself, so that errors there come out of `run`.

    Told to stop by a signal, it refuses new requests with 503 until those that run have ended or met the deadline. A
    second signal ends it at once.

    Args:
        at: where it listens, see `bound`.
        say: is given a line when it listens.
    """

    def __init__(self, llm: LLM, config: ServerConfig, at: socket.socket, say: Callable[[str], None] = print) -> None:
        self._socket = at
        app = create_app(llm, config)
        options: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "lifespan": "off"}
        options |= {"timeout_graceful_shutdown": SECONDS_TO_SEND, "timeout_keep_alive": SECONDS_IDLE}
        super().__init__(uvicorn.Config(app, **options))
        self._server: Server = app.state.server
        self._dispatcher = self._server.dispatcher
        self._model, self._seconds, self._say = config.model, config.request_timeout, say
        self._stops_at: float | None = None
        self._signal: int | None = None  # the first that it got
        host, port = at.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        """Where it listens."""

    def run(self, sockets: Any = None) -> None:
        """Serve until SIGTERM or Ctrl-C.

        Raises:
            KeyboardInterrupt: Ctrl-C ended it.
            what `LLM.engine` raises.
        """
        super().run([self._socket])
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt

    async def startup(self, sockets: Any = None) -> None:
        await self._server.start()
        await super().startup(sockets)
        self._say(f"serving {self._model} at {self.url}")

    async def shutdown(self, sockets: Any = None) -> None:
        await super().shutdown(sockets)
        await self._dispatcher.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            self.should_exit = self.force_exit = True
            return
        self._signal = sig
        self._stops_at = monotonic() + self._seconds
        self._dispatcher.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._stops_at is not None and (self._dispatcher.num_open == 0 or monotonic() >= self._stops_at):
            self.should_exit = True
        return await super().on_tick(counter)


def bound(host: str, port: int) -> socket.socket:
    """A socket at that address; port 0 takes a free one. It does not listen yet: nobody connects before the engine is
    there.

    Raises:
        ValueError: the address cannot be listened at.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as unless_bound:
            made = unless_bound.enter_context(socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            unless_bound.pop_all()
    except OSError as problem:
        raise ValueError(
            f"host and port must be free and this machine's, got {host} and {port} ({problem.strerror}); choose others"
        ) from problem
    return made
