"""Servers in processes of their own, or one that runs already, for `python -m eval serve`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

from eval.methods import file_name
from eval.questions import read_questions
from eval.replay import parse_policy
from eval.serve_client import Endpoint, model_of, send, server
from eval.serve_config import ServeConfig
from eval.serve_figures import Served
from eval.serve_load import Asked, output_lengths, random_prompts


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
    names = {"exit_layer": "--exit-layer", "num_draft_tokens": "--num-speculative-tokens"}
    for key, flag in names.items():
        flags += [flag, str(own[key])] if key in own else []
    return [*flags, *(["--drafters", ",".join(own["drafts"])] if "drafts" in own else [])]
