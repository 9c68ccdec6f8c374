"""`warm_up`: what the first requests would wait for, done before a server listens."""

from __future__ import annotations

from time import perf_counter

import torch

from selfspec.core import SamplingParams
from selfspec.decoding.engine import LLMEngine

PROMPT = 24  # tokens of a row
STEPS = 3
PARAMS = SamplingParams(max_tokens=64, temperature=1.0, ignore_eos=True, speculative=False)


def warm_up(engine: LLMEngine) -> float:
    """Decode a single row and a full batch for a few steps, and touch all memory of the cache.

    Nothing of it is kept: the policy is not asked, and the rows are aborted, so that no text is looked up later.

    Returns:
        new tokens per second of the full batch.
    """
    rate = 0.0
    for count in sorted({1, engine.max_num_seqs}):
        most = min(count, engine.max_num_cached_tokens // (PROMPT + 64))
        names = [f"warm-up {row}" for row in range(most)]
        for row, name in enumerate(names):
            engine.add_request(name, [(count + row) % engine.split.vocab_size] * PROMPT, PARAMS)
        for _ in range(STEPS):
            start = perf_counter()
            outputs = engine.step()
            num_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
            rate = num_tokens / (perf_counter() - start)
        for name in names:
            engine.abort(name)
        while engine.has_unfinished_requests():
            engine.step()
    with torch.inference_mode():
        if engine.prefix is not None:
            engine.prefix.clear()
        engine.cache.clear()
    return rate
