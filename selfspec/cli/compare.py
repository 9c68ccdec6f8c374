"""Times drafting against plain decoding and transformers' `generate` in one process, and compares their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from selfspec.cli.session import Run
from selfspec.executors.cpu.install import free_memory
from selfspec.llm import LLM
from selfspec.loading import hub
from selfspec.model.gguf_blocks import BlockWeight, Holding
from selfspec.params import SamplingParams, SpeculativeConfig

WARM_UP_TOKENS = 8
PAIRS = (2, 31)  # fewest and most timed runs of each: those of a small model take hundredths of a second
ENOUGH_SECONDS = 3.0  # no further pair is begun after this


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of every timed run, end to end, prompt included.

    Of the acceptance statistics a run that drafts knows what was known before the first, and it has no response of
    another run: none has seen the text that it is about to write.
    """

    drafted_runs: list[float]
    plain_runs: list[float]
    first_difference: int | None  # index of the first token, over all rows, that plain decoding chose differently
    generate_runs: list[float] = field(default_factory=list)  # by transformers' generate; none where it is not asked
    generate_difference: int | None = None  # index of the first token that it chose differently

    @property
    def drafted(self) -> float:
        return median(self.drafted_runs)

    @property
    def plain(self) -> float:
        return median(self.plain_runs)

    @property
    def about(self) -> str:
        """What the figures are of."""
        counts = f"{len(self.drafted_runs)} runs with drafts and {len(self.plain_runs)} without"
        return f"medians of {counts}, in turns; each starts from the acceptance statistics from before this call"

    @property
    def generate(self) -> float | None:
        return median(self.generate_runs) if self.generate_runs else None

    def as_dict(self) -> dict[str, object]:
        """Plain numbers for JSON."""
        return {
            "generate_seconds": self.generate_runs,
            "generate_speedup": None if self.generate is None else self.generate / self.drafted,
            "generate_first_difference": self.generate_difference,
            "speedup": self.plain / self.drafted,
            "tokens_identical": self.first_difference is None,
            "first_difference": self.first_difference,
            "drafted_seconds": self.drafted_runs,
            "plain_seconds": self.plain_runs,
        }


def compare(llm: LLM, prompts: list[list[int]], params: Sequence[SamplingParams], shown: Run) -> Comparison:
    """Warm all up, then run them in turns, each first in every other pair, until medians mean something.

    `generate` is slow where the compiled engine is not, so it runs twice, or once where that is enough.

    Args:
        llm: with the acceptance statistics from before the shown run. They stay as they are.
    """

    def run(config: SpeculativeConfig, own: Sequence[SamplingParams]) -> Run:
        done = Run()
        llm.with_speculative(config).generate(prompts, own, on_round=done.add)
        return done

    drafted: list[float] = []
    plain: list[float] = []
    generate: list[float] = []
    pair = [(llm.speculative, drafted), (SpeculativeConfig(policy="plain"), plain)]
    for config, _ in pair:
        run(config, [own.limited(WARM_UP_TOKENS) for own in params])
    asks = _generate_is_alike(llm, params) and _fits_dense(llm.target.model) and len(shown.token_ids) > 0
    if asks:
        _generate(llm, prompts[0], params[0], WARM_UP_TOKENS)
    written, theirs = [shown.token_ids], [shown.token_ids]
    while len(plain) < PAIRS[0] or (len(plain) < PAIRS[1] and sum(drafted) + sum(plain) < ENOUGH_SECONDS):
        pair = pair[::-1]
        for config, seconds in pair:
            done = run(config, params)
            seconds.append(done.seconds)
            written.append(done.token_ids)
        if asks and (not generate or (len(generate) < PAIRS[0] and sum(generate) < ENOUGH_SECONDS)):
            tokens, taken = _generate(llm, prompts[0], params[0], len(shown.token_ids))
            generate.append(taken)
            theirs.append(tokens)
    return Comparison(drafted, plain, _earliest_difference(written), generate, _earliest_difference(theirs))


def _generate_is_alike(llm: LLM, params: Sequence[SamplingParams]) -> bool:
    """Whether transformers' `generate` can be asked the same: one prompt, greedy, no option that it lacks.

    In sampling it draws other random numbers.
    """
    [own, *others], config = params, llm.target.defaults.config
    is_greedy = own.temperature == 0 or (own.temperature is None and not getattr(config, "do_sample", False))
    has_more = own.stops or own.stop_token_ids or own.ignore_eos or own.generation_config is False
    return not (others or has_more or own.presence_penalty or own.frequency_penalty) and is_greedy


def _fits_dense(model: nn.Module) -> bool:
    """Whether the float32 weights that transformers' `generate` would have take at most half of the free memory."""
    free, dense = free_memory(), [4 * one.numel() for one in model.parameters() if isinstance(one, BlockWeight)]
    return free is None or sum(dense) <= free / 2


def _generate(llm: LLM, prompt: list[int], params: SamplingParams, count: int) -> tuple[list[int], float]:
    """Up to `count` new tokens by transformers' `generate`, and the seconds it took."""
    model: Any = llm.target.model
    penalties: dict[str, Any] = {}
    if params.repetition_penalty is not None:
        penalties["repetition_penalty"] = params.repetition_penalty
    if params.no_repeat_ngram_size is not None:
        penalties["no_repeat_ngram_size"] = params.no_repeat_ngram_size
    ids = torch.tensor([prompt], device=llm.target.split.device)
    # `generate` is asked with the weights that it would have: not dequantised again at every token
    with hub.quiet(), Holding(model):
        start = perf_counter()
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **penalties
        ).tolist()
        return out[0][len(prompt) :], perf_counter() - start


def _earliest_difference(texts: list[list[int]]) -> int | None:
    differences = [at for other in texts[1:] if (at := first_difference(texts[0], other)) is not None]
    return min(differences, default=None)


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Index of the first token in which two lists differ; None when they are equal."""
    if one == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
