"""Continuations of many prompts at once by `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from selfspec.kernels.gumbel import gumbel
from train.backbone import plain_model


class RowNoise(LogitsProcessor):
    """Adds noise to every row's logits, so that the largest one is a sample at its temperature; none at 0.

    The noise is that of selfspec's engine: a row depends on its seed, not on its neighbours.
    """

    def __init__(self, temperatures: Tensor, seeds: Tensor, padding: Tensor) -> None:
        self.temperatures, self.seeds, self.padding = temperatures[:, None], seeds, padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        noise = gumbel(self.seeds, input_ids.shape[1] - self.padding, scores.shape[1])
        sampled = scores.float() / self.temperatures.clamp(min=1e-3) + noise
        return torch.where(self.temperatures > 0, sampled, scores.float())


def continue_prompts(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperatures: Sequence[float] = (),
    seeds: Sequence[int] = (),
    ends: Sequence[int] = (),
) -> list[list[int]]:
    """Continue prompts in one batch; return the new tokens of each, up to an end token, which is included.

    The model's own settings for sampling and penalties are not used.

    Args:
        prompts: token ids, at least one each.
        temperatures, seeds: one per prompt; default: greedy.
        ends: tokens after which a continuation ends, besides the model's end-of-text tokens.
    """
    plain: Any = plain_model(model)
    device, stops = next(plain.parameters()).device, [*end_tokens(plain), *ends]
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[stops[0]] * n + list(own) for n, own in zip(padding, prompts, strict=True)], device=device)
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding], device=device)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=stops,
        pad_token_id=stops[0],
    )
    processors = []
    if any(temperature > 0 for temperature in temperatures):
        processors = [RowNoise(*(torch.tensor(list(each), device=device) for each in (temperatures, seeds, padding)))]
    with torch.no_grad():
        whole = plain.generate(
            tokens, attention_mask=mask, generation_config=settings, logits_processor=LogitsProcessorList(processors)
        )
    return [_until_end(row, stops) for row in whole[:, longest:].tolist()]


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    return tokens[: next((place for place, token in enumerate(tokens, start=1) if token in ends), len(tokens))]


def end_tokens(model: nn.Module) -> list[int]:
    """Return the end-of-text ids of the generation config, else of the model config; [0] if there are none."""
    plain = plain_model(model)
    for holder in (plain.generation_config, plain.config):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return [0]
