"""llama.cpp as the judge of how GGUF files are read."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from urllib.parse import urlparse


class LlamaCpp:
    """A llama.cpp server inside this process, on one file.

    Args:
        exact: keep keys and values in float32 instead of float16, and attend without rounding.
    """

    def __init__(self, file, context=512, exact=False):
        import xllamacpp

        options = xllamacpp.CommonParams()
        options.model.path = str(file)
        options.n_ctx, options.n_parallel, options.n_gpu_layers = context, 1, 0
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        if exact:
            options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
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

    def ends(self, token, ids=(0,)):
        """Whether a token that is picked after some token ids ends the output."""
        bias = [[token, 1000.0]]
        done = self.ask("/completion", prompt=list(ids), n_predict=2, temperature=0, logit_bias=bias)
        return done["stop_type"] == "eos"

    def next_logprobs(self, ids, count=5, forced=None):
        """The likeliest tokens after some token ids, with their log-probabilities.

        Args:
            forced: the token that is picked, which changes no log-probability; the server answers nothing where the
                token picked ends a text or is a part of a letter.
        """
        body = {"prompt": ids, "n_predict": 1, "n_probs": count, "temperature": 0, "cache_prompt": False}
        body |= {} if forced is None else {"logit_bias": [[forced, 1000.0]]}
        [first] = self.ask("/completion", **body)["completion_probabilities"]
        return {one["id"]: one["logprob"] for one in first["top_logprobs"]}
