"""The self-check of exact mode: whether results for a token depend on the other tokens of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.model.kv_cache import PackedRows, Span
from selfspec.model.stack import Stack

LENGTHS = (37, 21, 6)  # tokens of three rows: several tiles and blocks, and a row within one block
CUDA_LENGTHS = (600, 37, 21)  # the first one has several splits, and its prompt wide blocks
STEPS = 4  # last tokens of each row, run one by one, and then together
PAGE = 8


@torch.inference_mode()
def difference(stack: Stack) -> str:
    """Compare rows decoded alone, token by token, with the same rows in a batch, split at an exit layer.

    Calls are recorded where the stack does so in decoding.

    Returns:
        What differs ("hidden states" or "logits"), or "" where nothing does.

    Raises:
        Exception: whatever the model's forward raises.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [min(n, stack.context_limit) for n in (LENGTHS if stack.device.type == "cpu" else CUDA_LENGTHS)]
    prompts = [torch.randint(stack.vocab_size, (n,), generator=generator).to(stack.device) for n in lengths]
    alone = [_alone(stack, prompt) for prompt in prompts]
    for exit_layer in sorted({max(1, stack.num_layers // 4), stack.num_layers // 2}):
        order = (0, 1, 2) if exit_layer % 2 else (2, 0, 1)
        together = _together(stack, [prompts[i] for i in order], exit_layer)
        for i, (hidden, logits) in zip(order, together, strict=True):
            if not torch.equal(hidden, alone[i][0]):
                return "hidden states"
            if not torch.equal(logits, alone[i][1]):
                return "logits"
    return ""


def _alone(stack: Stack, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of the last tokens, one token per call."""
    cache = stack.new_cache(1, len(prompt))
    first = len(prompt) - STEPS

    def read(start: int, length: int) -> Tensor:
        rows = PackedRows(cache, [Span([0], start, length)], stack.device)
        rows.plans["prompts"] = [first if start < first else 0]
        return stack.run(rows, 0, stack.num_layers, prompt[start : start + length])

    read(0, first)
    hidden = [read(first + step, 1) for step in range(STEPS)]
    return torch.cat(hidden), torch.cat([stack.logits(one) for one in hidden])


def _together(stack: Stack, prompts: list[Tensor], exit_layer: int) -> list[tuple[Tensor, Tensor]]:
    """The same for several rows in small pages, packed in one call, split at the exit layer."""
    cache = stack.new_cache(sum(-(-len(prompt) // PAGE) for prompt in prompts), PAGE)
    pages = [cache.reserve(len(prompt)) or [] for prompt in prompts]
    firsts = [len(prompt) - STEPS for prompt in prompts]

    def read(starts: list[int], lengths: list[int]) -> Tensor:
        spans = [Span(*each) for each in zip(pages, starts, lengths, strict=True)]
        rows = PackedRows(cache, spans, stack.device)
        rows.plans["prompts"] = [end if at < end else 0 for at, end in zip(starts, firsts, strict=True)]
        parts = zip(prompts, starts, lengths, strict=True)
        hidden = stack.run(rows, 0, exit_layer, torch.cat([prompt[at : at + n] for prompt, at, n in parts]))
        return stack.run(rows, exit_layer, stack.num_layers, hidden)

    read([0] * len(prompts), firsts)
    hidden = read(firsts, [STEPS] * len(prompts))
    return list(zip(hidden.split(STEPS), stack.logits(hidden).split(STEPS), strict=True))
