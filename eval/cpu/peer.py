"""Greedy decoding by llama.cpp, in a process of its own: `python peer.py MODEL.gguf CONTEXT THREADS`.

Needs llama-cpp-python and numpy alone. Reads lines of JSON `{"prompt": [ids], "max_new_tokens": n}` and answers each
with `{"tokens": [ids], "seconds": s, "processor": s}` (wall time, its processes' time), or `{"error": ...}`.
"""

import ctypes
import json
import sys
import time

import llama_cpp as api
import numpy as np


def main() -> None:
    path, context, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    api.llama_log_set(QUIET, ctypes.c_void_p(0))
    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    options = api.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_threads, options.n_threads_batch = context, context, threads, threads
    options.type_k = options.type_v = api.GGML_TYPE_F32
    state = api.llama_init_from_model(model, options)
    size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(state, size, **json.loads(line))), flush=True)


def answer(state, size, prompt, max_new_tokens):
    api.llama_memory_clear(api.llama_get_memory(state), True)
    start, busy = time.perf_counter(), time.process_time()
    tokens, given = [], list(prompt)
    while len(tokens) < max_new_tokens:
        array = (api.llama_token * len(given))(*given)
        if api.llama_decode(state, api.llama_batch_get_one(array, len(given))) != 0:
            return {"error": "llama_decode failed"}
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(state, -1), shape=(size,))
        given = [int(logits.argmax())]
        tokens += given
    return {"tokens": tokens, "seconds": time.perf_counter() - start, "processor": time.process_time() - busy}


@api.llama_log_callback
def QUIET(level, text, data):
    pass


if __name__ == "__main__":
    main()
