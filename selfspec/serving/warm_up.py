"""`warm_up`: what the first requests would wait for, done before a server listens."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from selfspec.core import RoundOutput
from selfspec.decoding.engine import LLMEngine
from selfspec.params import SamplingParams
from selfspec.serving.pace import Work

PROMPT = 24  # tokens of a row
STEPS = 3
PARAMS = SamplingParams(max_tokens=64, temperature=1.0, ignore_eos=True, speculative=False)


def warm_up(engine: LLMEngine) -> Work:
    """Decode a single row and a full batch for a few steps, and touch all memory of the cache.

    Nothing of it is kept: the policy is not asked, and the rows are aborted, so that no text is looked up later.

    Returns:
        what the full batch did.
    """
    work = Work()
    for count in sorted({1, engine.max_num_seqs}):
        most = min(count, engine.max_num_cached_tokens // (PROMPT + 64))
        names = [f"warm-up {row}" for row in range(most)]
        for row, name in enumerate(names):
            engine.add_request(name, [(count + row) % engine.split.vocab_size] * PROMPT, PARAMS)
        work = Work(num_read=PROMPT * most)
        for _ in range(STEPS):
            start, rounds = perf_counter(), list[RoundOutput]()
            engine.step(rounds.append)
            work.add(work_of(rounds, perf_counter() - start))
        for name in names:
            engine.abort(name)
        while engine.has_unfinished_requests():
            engine.step()
    with torch.inference_mode():
        if engine.prefix is not None:
            engine.prefix.clear()
        engine.cache.clear()
    return work


def work_of(rounds: Sequence[RoundOutput], seconds: float) -> Work:
    """The new tokens of a step that took so many seconds, without the prompt tokens that it read."""
    read = min(seconds, sum(one.seconds.prefill for one in rounds))
    return Work(sum(len(row.token_ids) for one in rounds for row in one.rows), seconds - read, 0.0, read)
