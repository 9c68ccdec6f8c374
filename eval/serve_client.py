"""Serve loads by OpenAI-compatible servers: one that runs already, or one per load in a process of its own.

A request is sent when it arrives, whatever the server has answered until then (an open loop). Answers are streamed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from eval.methods import file_name
from eval.questions import read_questions
from eval.replay import parse_policy
from eval.serve_load import Asked, Served, output_lengths, random_prompts

if TYPE_CHECKING:
    from eval.serve import ServeConfig

STOP_SECONDS = 20.0  # after which a server that was asked to stop is killed
POLL_SECONDS = 0.2  # between two looks whether a server is ready
LOG_LINES = 5  # shown of a server that did not start


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and how they are written.

    Args:
        url: of the server, without /v1.
        model: its name there.
        is_chat: send texts as chats, not as completions.
        fields: further fields of every request's body.
        headers: of every request, such as an API key.
        seconds: of a request, after which it counts as failed.
    """

    url: str
    model: str
    is_chat: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 600.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, asked: Asked) -> dict[str, Any]:
        """A streamed request that ends at its length only."""
        text = asked.prompt if isinstance(asked.prompt, str) else list(asked.prompt)
        if self.is_chat:
            own = {"messages": [{"role": "user", "content": text}], "max_completion_tokens": asked.num_output}
        else:
            own = {"prompt": text, "max_tokens": asked.num_output}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **own, "temperature": 0.0, "ignore_eos": True, **stream, **self.fields}


def send(endpoint: Endpoint, asked: Sequence[Asked], arrivals: Sequence[float]) -> list[Served]:
    """Send every request when it arrives; the results are in the requests' order. Failures are results, too."""
    return asyncio.run(_send(endpoint, asked, arrivals))


async def _send(endpoint: Endpoint, asked: Sequence[Asked], arrivals: Sequence[float]) -> list[Served]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    options: dict[str, Any] = {"base_url": endpoint.url, "headers": dict(endpoint.headers), "limits": limits}
    async with httpx.AsyncClient(timeout=endpoint.seconds, trust_env=False, **options) as client:
        start = time.perf_counter()

        async def at(arrival: float, one: Asked) -> Served:
            await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
            return await _ask(client, endpoint, one, start)

        return await asyncio.gather(*map(at, arrivals, asked))


async def _ask(client: httpx.AsyncClient, endpoint: Endpoint, asked: Asked, start: float) -> Served:
    sent, times, usage, error = time.perf_counter() - start, list[float](), dict[str, int](), ""
    try:
        async with (
            asyncio.timeout(endpoint.seconds),
            client.stream("POST", endpoint.path, json=endpoint.body(asked)) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                text = (await answer.aread()).decode("utf-8", "replace")
                error = f"{answer.status_code}: {' '.join(text.split())[:200]}"
            else:
                async for chunk in _chunks(answer):
                    usage = chunk.get("usage") or usage
                    if _has_tokens(chunk):
                        times.append(time.perf_counter() - start)
    except TimeoutError:
        error = f"no complete answer in {endpoint.seconds:g} seconds"
    except (httpx.HTTPError, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    if not error and not times:
        error = "the stream held no token"
    elif not error and "completion_tokens" not in usage:
        error = "the stream ended without usage, which counts the tokens"
    return Served(sent, tuple(times), usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), error)


async def _chunks(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of server-sent events; comments are skipped.

    Raises:
        ValueError: an event is no JSON object, or reports an error.
    """
    async for line in answer.aiter_lines():
        name, _, data = line.partition(":")
        data = data.strip()
        if name != "data" or not data:
            continue
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if not isinstance(chunk, dict) or "error" in chunk:
            raise ValueError(f"the server sent {data[:200]}")
        yield chunk


def _has_tokens(chunk: Mapping[str, Any]) -> bool:
    """Whether a chunk brings tokens: text, or an end, whose last token may have none; not so the role of a chat."""
    for choice in chunk.get("choices") or ():
        content = choice.get("delta", choice)
        if content.get("content") or content.get("text") or choice.get("finish_reason"):
            return True
    return False


def model_of(url: str, headers: Mapping[str, str]) -> str:
    """The name of the first model of a server.

    Raises:
        ValueError: it does not answer /v1/models as OpenAI does.
    """
    try:
        answer = httpx.get(f"{url}/v1/models", headers=dict(headers), timeout=30.0, trust_env=False)
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as problem:
        raise ValueError(
            f"{url}/v1/models names no model ({problem}); give --server an OpenAI-compatible server"
        ) from None


@contextmanager
def server(command: Sequence[str], log: Path, within: float) -> Iterator[str]:
    """Run a server in a process of its own; yields its URL when /health answers 200.

    Args:
        command: its command line; `{port}` in an argument is replaced by the port that it must listen on.
        log: file for its output.
        within: seconds until it must be ready.

    Raises:
        ValueError: it ended, or was not ready in time.
    """
    port = _free_port()
    filled = [part.replace("{port}", str(port)) for part in command]
    with log.open("wb") as file:
        process = subprocess.Popen(filled, stdout=file, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url, within, shlex.join(filled), log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, within: float, command: str, log: Path) -> None:
    end = time.monotonic() + within
    while time.monotonic() < end:
        if process.poll() is not None:
            lines = log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
            raise ValueError(f"the server ended with code {process.returncode}: {command}: {' / '.join(lines)}")
        try:
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(POLL_SECONDS)
    raise ValueError(f"the server was not ready in {within:g} seconds: {command}; its output is in {log}")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Live:
    """Serves loads by a server per load, or by one that runs already.

    Raises:
        ValueError: the questions cannot be read.
    """

    def __init__(self, config: ServeConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.title = config.server or f"{config.model}, a server per load"
        self.asked = _asked(config)
        key = os.environ.get(config.api_key_variable, "")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def serve(self, policy: str, arrivals: Sequence[float]) -> list[Served]:
        """Serve the load once, after the uncounted requests.

        Raises:
            ValueError: the server does not start, or fails the first requests.
        """
        with self._running(policy) as url:
            name = model_of(url, self._headers)
            endpoint = Endpoint(url, name, self.config.chat, headers=self._headers, seconds=self.config.time_limit)
            for one in self.asked[: self.config.warmups]:
                (first,) = send(endpoint, [one], [0.0])
                if first.error:
                    raise ValueError(f"the server of {policy} failed the first request: {first.error}")
            return send(endpoint, self.asked, arrivals)

    @contextmanager
    def _running(self, policy: str) -> Iterator[str]:
        if self.config.server:
            yield self.config.server.rstrip("/").removesuffix("/v1")
            return
        log = self.folder / f"{file_name(policy)}.log"
        with server(command_of(self.config, policy), log, self.config.start_limit) as url:
            yield url


def _asked(config: ServeConfig) -> list[Asked]:
    count = config.num_requests
    if config.questions:
        questions = read_questions(config.questions, config.num_questions, path=config.questions_path)
        prompts: list[str | tuple[int, ...]] = [question.turns[0] for question in questions]
    else:
        prompts = [*random_prompts(count, config.prompt_tokens, config.vocab_size, config.seed)]
    lengths = output_lengths(count, config.output_tokens, config.seed)
    return [Asked(prompt, n) for prompt, n in zip(islice(cycle(prompts), count), lengths, strict=True)]


def command_of(config: ServeConfig, policy: str) -> list[str]:
    """The command line of a server, with `{port}` left in it."""
    command = list[str]()
    for part in shlex.split(config.command):
        if part == "{speculation}":
            command += speculation(policy)
        else:
            command.append(part.replace("{python}", sys.executable).replace("{model}", config.model))
    return command


def speculation(policy: str) -> list[str]:
    """The flags of `selfspec serve` for a policy's name."""
    own = parse_policy(policy).settings
    flags = ["--policy", str(own["policy"])]
    names = {"exit_layer": "--exit-layer", "num_speculative_tokens": "--num-speculative-tokens"}
    for key, flag in names.items():
        flags += [flag, str(own[key])] if key in own else []
    return [*flags, *(["--drafters", ",".join(own["drafters"])] if "drafters" in own else [])]
