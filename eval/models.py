"""Opening models and decoding with them. Other modules of eval/ use the library through this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from eval.config import Common
from selfspec import LLM, SamplingParams, SpeculativeConfig
from selfspec.calibrate.measure import measure
from selfspec.control.costs import Costs
from selfspec.decoding.defaults import GenerationDefaults
from selfspec.decoding.engine import PAGE_SIZE, OnRound
from selfspec.decoding.outputs import CompletionOutput
from selfspec.loading import hub
from selfspec.loading.names import find, is_gguf
from selfspec.model.kv_cache import PackedRows, Span

Ids = Sequence[Sequence[int]]  # prompts, as token ids


def open_llm(model: Any, config: Common | None = None, **options: Any) -> LLM:
    """Open a model with the device, dtype and number of threads of a configuration. No prompt is read from a cache.

    Args:
        model: a name, or a transformers model, which is not copied.
        config: None for a transformers model.
        options: other arguments of `selfspec.LLM`.

    Raises:
        ValueError, OSError, UnsupportedModelError: see `selfspec.LLM`.
    """
    logging.set_verbosity_error()  # no warnings about transformers' own assisted generation
    if config is not None:
        if config.threads:
            torch.set_num_threads(config.threads)
        options |= {"device": config.device or None, "dtype": config.dtype}
    return LLM(model, prefix_cache=False, **options)


def with_policy(llm: LLM, *, max_num_seqs: int = 1, exact: bool = False, **settings: Any) -> LLM:
    """The same opened model with a policy. What it learns is its own, and its outputs have no text.

    Args:
        settings: fields of `SpeculativeConfig`; by default no output drafts for another one.
    """
    made = llm.with_speculative(SpeculativeConfig(**{"reuse_responses": False, **settings}))
    made.max_num_seqs, made.exact, made.target.tokenizer = max_num_seqs, exact, None
    made.target.defaults = GenerationDefaults(llm.target.split.model)
    return made


def params_of(
    max_new_tokens: int, temperature: float = 0.0, seed: int = 0, eos: Sequence[int] | frozenset[int] = ()
) -> SamplingParams:
    """Sampling that depends on these arguments only, not on the model's generation config.

    Args:
        eos: tokens that end the output; empty: only the length does.
    """
    ends: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": sorted(eos) or None, "generation_config": False}
    return SamplingParams(max_tokens=max_new_tokens, temperature=temperature, seed=seed, **ends)


def decode(
    llm: LLM,
    prompts: Ids,
    max_new_tokens: int | Sequence[int],
    *,
    temperature: float = 0.0,
    seeds: int | Sequence[int] = 0,
    predictions: Ids | None = None,
    on_round: OnRound | None = None,
) -> list[CompletionOutput]:
    """The outputs of the prompts, in their order; only their length ends them.

    Args:
        max_new_tokens, seeds: one number for all prompts, or one per prompt.
        predictions: predicted outputs, which are drafted from; None: there are none.
    """
    several = [[given] * len(prompts) if isinstance(given, int) else given for given in (max_new_tokens, seeds)]
    params = [params_of(most, temperature, seed) for most, seed in zip(*several, strict=True)]
    if predictions is not None:
        params = [replace(one, prediction=list(ids)) for one, ids in zip(params, predictions, strict=True)]
    done = llm.generate([list(prompt) for prompt in prompts], params, on_round=on_round)
    return [request.outputs[0] for request in done]


def measured_costs(llm: LLM, batch_sizes: Sequence[int], repeats: int, **options: Any) -> Costs:
    """Measure the cost table; every piece of a round is timed up to `repeats` times and at least once.

    Args:
        options: other arguments of `selfspec.calibrate.measure.measure`.
    """
    return measure(llm.target.split, batch_sizes, repeats, **options)


def all_logits(llm: LLM, ids: Tensor) -> Tensor:
    """The split model's logits `[rows, length, vocab]` after ids `[rows, length]`."""
    split, (num_rows, length) = llm.target.split, ids.shape
    page = length + -length % PAGE_SIZE
    with torch.inference_mode():
        cache = split.new_cache(num_rows, page)
        rows = PackedRows(cache, [Span([i], 0, length) for i in range(num_rows)], split.device)
        hidden = split.run(rows, 0, split.num_layers, ids.to(split.device).flatten())
        return split.logits(hidden).view(num_rows, length, -1)


def open_peer(model: str, llm: LLM) -> tuple[Any, Any]:
    """Open a second transformers model and its tokenizer, on the same device and in the same dtype."""
    split = llm.target.split
    return hub.open_model(model, dtype=str(split.dtype).removeprefix("torch."), device=split.device)


def gguf_file(model: str) -> Path | None:
    """The GGUF file of a model's name; None where it has none."""
    try:
        source = find(model)
    except OSError:
        return None
    return Path(source) if is_gguf(source) else None
