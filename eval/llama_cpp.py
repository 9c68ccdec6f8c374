"""llama.cpp as a method, through the package xllamacpp: greedy, on the same GGUF file and as many threads.

Its arithmetic is another one: it multiplies by the file's own 4- or 8-bit blocks and rounds activations too, where
selfspec computes with the float32 numbers that the blocks stand for. So its tokens may differ from plain decoding's.
"""

from __future__ import annotations

import http.client
import json
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlparse

import torch

from eval.answers import Failure, Prompt, Skipped, Steps, Turn
from eval.methods import LLAMA_CPP, MethodName
from eval.models import gguf_file


class LlamaCpp:
    """A server of llama.cpp inside this process, asked for one prompt's token ids at a time.

    Args:
        model: what the run opens; its GGUF file is used where the method's name has none.
        context: most tokens of a prompt with its answer.
        eos: tokens that end the output; none: only the length does. llama.cpp knows its own ends of text, and whatever
            that token is, the first of these stands for it.
        limit: seconds per prompt, looked at after every token.

    Raises:
        Skipped: the package or the file is missing, or output is sampled.
    """

    def __init__(
        self, model: str, method: MethodName, context: int, eos: frozenset[int], temperature: float, limit: float
    ) -> None:
        self.name, self.eos, self.limit = method.name, sorted(eos), limit
        if temperature > 0:
            raise Skipped(f"{self.name} is compared greedily alone; set temperature to 0")
        if find_spec("xllamacpp") is None:
            raise Skipped(f"{self.name} needs the package xllamacpp: pip install xllamacpp")
        path = gguf_file(method.option or model)
        if path is None:
            wanted = method.option or model
            raise Skipped(f"{self.name} needs a GGUF file, and {wanted!r} is none; name one as {LLAMA_CPP}:FILE")
        self.server = _started(path, context)
        self.address = urlparse(self.server.listening_address)

    def __call__(self, prompt: Prompt) -> Turn:
        asked = {
            "prompt": prompt.ids,
            "n_predict": prompt.max_new_tokens,
            "temperature": 0.0,
            "cache_prompt": False,
            "return_tokens": True,
            "ignore_eos": not self.eos,
            "stream": True,
        }
        steps, tokens, end = Steps(self.limit), list[int](), dict[str, Any]()
        connection = http.client.HTTPConnection(str(self.address.hostname), self.address.port, timeout=self.limit)
        try:
            connection.request("POST", "/completion", json.dumps(asked), {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if not line.startswith(b"data: {"):
                    continue
                end = json.loads(line.removeprefix(b"data: "))
                if end.get("tokens"):
                    tokens += end["tokens"]
                    steps.add(len(end["tokens"]))
        except TimeoutError:
            raise Failure("timeout", f"no token within {self.limit:g} s", perf_counter() - steps.start) from None
        finally:
            connection.close()
        seconds = perf_counter() - steps.start
        if not end.get("stop"):
            raise Failure("error", f"llama.cpp ended without an answer: {json.dumps(end)[:200]}", seconds)
        if end.get("stop_type") == "eos" and self.eos and tokens[-1:] != self.eos[:1]:
            tokens.append(self.eos[0])
            steps.add(1)
        return Turn(tokens, seconds, accept_lengths=steps.sizes, step_seconds=steps.seconds)

    def close(self) -> None:
        del self.server


def _started(path: Path, context: int) -> Any:
    import xllamacpp  # a large library, and needed here alone

    options = xllamacpp.CommonParams()
    options.model.path = str(path)
    options.n_ctx, options.n_parallel, options.n_gpu_layers = context, 1, 0
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = torch.get_num_threads()
    options.verbosity, options.ui = -1, False
    try:
        return xllamacpp.Server(options)
    except Exception as problem:  # whatever it raises, the run can do without this method
        raise Skipped(f"llama.cpp cannot open {path}: {' '.join(str(problem).split())}") from problem
