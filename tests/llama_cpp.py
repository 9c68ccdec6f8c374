"""llama.cpp as the judge of how GGUF files are read."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from urllib.parse import urlparse


class LlamaCpp:
    """A llama.cpp server inside this process, on one file."""

    def __init__(self, file, context=512):
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path = str(file)
        options.n_ctx, options.n_parallel, options.n_gpu_layers = context, 1, 0
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        options.verbosity, options.ui, options.warmup = -1, False, False
        self._server = xllamacpp.Server(options)
        self._address = urlparse(self._server.listening_address)

    def ask(self, route, **body):
        connection = http.client.HTTPConnection(self._address.hostname, self._address.port, timeout=120)
        with closing(connection):
            connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
            return json.loads(connection.getresponse().read())

    def tokenize(self, text, add_special=False):
        """The token ids of a text in which special tokens are read as such."""
        return self.ask("/tokenize", content=text, add_special=add_special, parse_special=True)["tokens"]

    def next_logprobs(self, ids, count=5):
        """The likeliest tokens after some token ids, with their log-probabilities."""
        body = {"prompt": ids, "n_predict": 1, "n_probs": count, "temperature": 0, "cache_prompt": False}
        [first] = self.ask("/completion", **body)["completion_probabilities"]
        return {one["id"]: one["logprob"] for one in first["top_logprobs"]}
