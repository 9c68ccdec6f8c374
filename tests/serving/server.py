"""A server on a socket of its own, in a thread, and the model behind it; policies by which tests hold it up."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager

import httpx

from selfspec import LLM, SpeculativeConfig
from selfspec.control.plan import Plan, Policy
from selfspec.serving.config import ServerConfig
from selfspec.serving.run import DrainingServer, bound
from tests.cli_fixtures import TEMPLATE
from tests.helpers import Schedule
from tests.models import build
from tests.tokenizers import byte_tokenizer

MODEL = "tiny"
PATIENCE = 600.0  # seconds after which a test that hangs fails


def speaker(policy=None, **options):
    """A random model of bytes with a chat template, whose policy throws dice; texts hold many broken characters."""
    model = build("llama", vocab_size=257, eos_token_id=256, pad_token_id=256, max_position_embeddings=512)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    speculative = SpeculativeConfig(policy=policy or Schedule(0, 4))
    return LLM(model, tokenizer=tokenizer, speculative=speculative, **options)


class Gate(Policy):
    """Plain decoding, a round at a time, each of which waits until the test lets it run."""

    def __init__(self):
        self.reached, self._rounds, self._is_broken = threading.Event(), threading.Semaphore(0), False

    def let(self, num_rounds):
        """Let this many more rounds run."""
        self._rounds.release(num_rounds)

    def open(self):
        """Let all further rounds run."""
        self.let(1_000_000)

    def fail(self):
        """Let the next round fail."""
        self._is_broken = True
        self.let(1)

    def plan(self, rows):
        self.reached.set()
        assert self._rounds.acquire(timeout=PATIENCE), "nobody opened the gate"
        if self._is_broken:
            raise RuntimeError("the policy is broken")
        return Plan(None, ())


class Clock:
    """A clock that goes on by a microsecond at every look, and as the test moves it; a server's deadlines follow it."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        for module in ("loop", "calls", "run"):
            monkeypatch.setattr(f"selfspec.serving.{module}.monotonic", self.look)

    def look(self):
        self.now += 1e-6
        return self.now


class Served:
    """A running server and a client of it."""

    def __init__(self, server):
        self.server, self.url = server, server.url
        self.http = httpx.Client(base_url=server.url, timeout=PATIENCE, verify=False)

    def complete(self, prompt="Hello", **fields):
        """A completion, greedy where no temperature is named."""
        return self.http.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})

    def chat(self, text="Hi", **fields):
        """A greedy answer to a text, or to `messages`."""
        asked = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
        return self.http.post("/v1/chat/completions", json=asked)

    def text(self, prompt="Hello", **fields):
        answer = self.complete(prompt, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def metric(self, name, **labels):
        """The value of a metric; 0 where there is none."""
        wanted = "".join(rf'(?=[^}}]*{label}="{value}")' for label, value in labels.items())
        found = re.search(rf"^{name}\{{{wanted}[^}}]*\}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def stop(self):
        """What SIGTERM does; a second one ends it at once."""
        self.server.handle_exit(signal.SIGTERM, None)


@contextmanager
def serving(llm, **config):
    """A server of this model while the block runs."""
    ready, at = threading.Event(), bound("127.0.0.1", 0)
    server = DrainingServer(llm, ServerConfig(model=MODEL, **config), at, lambda line: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    served = Served(server)
    try:
        assert ready.wait(PATIENCE), "the server did not come up"
        yield served
    finally:
        served.http.close()
        served.stop()
        served.stop()
        thread.join(PATIENCE)
        at.close()
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def asked(served, **body):
    """A socket on which a completion was asked for, and which is closed at the end, whatever came."""
    content = json.dumps(body).encode()
    url, client = httpx.URL(served.url), socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(PATIENCE)
    with client:
        client.connect((url.host, url.port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        client.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield client


def eventually(holds, what="it"):
    """Wait until something holds."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"{what} never came to hold"
        time.sleep(0.01)
