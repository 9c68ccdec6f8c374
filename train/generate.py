"""Greedy continuations of many prompts at once by `model.generate`, of models that are being trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from train.backbone import plain_model


def continue_prompts(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[list[int]]:
    """Continue prompts greedily in one batch; return the new tokens of each, up to an end token, which is included.

    The model's own settings for sampling and penalties are not used.

    Args:
        prompts: token ids, at least one each.
    """
    plain: Any = plain_model(model)
    device, stops = next(plain.parameters()).device, end_tokens(plain)
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
    with torch.no_grad():
        whole = plain.generate(tokens, attention_mask=mask, generation_config=settings)
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
