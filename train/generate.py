"""Continuations of many prompts at once by `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from train.backbone import plain_model


class RowTemperatures(LogitsProcessor):
    """Divides the logits of every row by its own temperature; at 0, all but the largest become -inf."""

    def __init__(self, temperatures: Tensor) -> None:
        self.temperatures = temperatures[:, None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        best = scores.argmax(-1, keepdim=True)
        greedy = torch.full_like(scores, float("-inf")).scatter(-1, best, 0.0)
        return torch.where(self.temperatures > 0, scores / self.temperatures.clamp(min=1e-3), greedy)


def continue_prompts(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperatures: Sequence[float] = (),
    ends: Sequence[int] = (),
) -> list[list[int]]:
    """Continue prompts in one batch; return the new tokens of each, up to an end token, which is included.

    The model's own settings for sampling and penalties are not used.

    Args:
        prompts: token ids, at least one each.
        temperatures: one per prompt; default: greedy. Samples come from torch's global generator.
        ends: tokens after which a continuation ends; default: the model's end-of-text tokens.
    """
    plain: Any = plain_model(model)
    device, stops = next(plain.parameters()).device, list(ends or end_tokens(plain))
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[stops[0]] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    sampled = any(temperature > 0 for temperature in temperatures)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=sampled,
        **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}),
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=stops,
        pad_token_id=stops[0],
    )
    processors = [RowTemperatures(torch.tensor(list(temperatures), device=device))] if sampled else []
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
