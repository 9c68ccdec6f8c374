"""A llama.cpp server inside this process, through the package xllamacpp. Nothing else is imported, so that a process
with it alone can be measured."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlparse


class LlamaServer:
    """llama.cpp on a GGUF file; it stops when the object is deleted.

    Args:
        context: maximum tokens of a prompt with its output.

    Raises:
        ImportError: the package xllamacpp is missing.
        Exception: the file cannot be opened.
    """

    def __init__(self, file: Path, context: int, threads: int) -> None:
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path = str(file)
        options.n_ctx, options.n_parallel, options.n_gpu_layers = context, 1, 0
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = threads
        options.verbosity, options.ui = -1, False
        self._server = xllamacpp.Server(options)
        self._address = urlparse(self._server.listening_address)

    def complete(
        self, prompt: str | Sequence[int], max_tokens: int, ignore_eos: bool, limit: float
    ) -> Iterator[dict[str, Any]]:
        """Continue a prompt greedily; yields the server's replies, whose `tokens` are new ones.

        Args:
            limit: seconds.

        Raises:
            TimeoutError: the server sent nothing for `limit` seconds.
        """
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "n_predict": max_tokens}
        body |= {"ignore_eos": ignore_eos, "temperature": 0.0, "cache_prompt": False}
        body |= {"return_tokens": True, "stream": True}
        connection = http.client.HTTPConnection(str(self._address.hostname), self._address.port, timeout=limit)
        with closing(connection):
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
