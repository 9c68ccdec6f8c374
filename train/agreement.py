"""How good every exit is: its loss on held-out code, and how often it agrees with the whole model's greedy choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from train.config import EvalConfig
from train.recipe import layer_outputs


@dataclass(frozen=True, slots=True)
class ExitQuality:
    """Measured quality of exits 1..L, in order; the last entry is the whole model.

    Agreement is counted along the whole model's own greedy continuations, which is what speculation sees.
    """

    loss: tuple[float, ...]
    agreement: tuple[float, ...]
    loss_tokens: int
    agreement_tokens: int


@contextmanager
def evaluating(model: LlamaForCausalLM) -> Iterator[None]:
    """Put a model into plain evaluation (no gradient, no dropout, no compiled layers) and back."""
    was_training, layers = model.training, model.model.layers
    compiled = [vars(layer).pop("forward", None) for layer in layers]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        for layer, forward in zip(layers, compiled, strict=True):
            if forward is not None:
                layer.forward = forward


def exit_logits(model: LlamaForCausalLM, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the logits `[B, T, V]` of exits 1..L for tokens `[B, T]`, through the final norm and head."""
    layers = model.model.layers
    with layer_outputs(layers, range(1, len(layers) + 1)) as states:
        model.model(input_ids=tokens, use_cache=False)
    for number in range(1, len(layers) + 1):
        yield model.lm_head(model.model.norm(states[number]))


def exit_losses(model: LlamaForCausalLM, windows: Tensor, rows: int = 8) -> tuple[float, ...]:
    """Mean cross entropy in nats per token of exits 1..L on token windows `[N, T]`."""
    total = torch.zeros(len(model.model.layers), dtype=torch.float64)
    with evaluating(model):
        for batch in windows.split(rows):
            for index, logits in enumerate(exit_logits(model, batch)):
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")
                total[index] += loss.double().cpu()
    return tuple((total / windows[:, 1:].numel()).tolist())


def exit_agreement(
    model: LlamaForCausalLM, prompts: Tensor, new_tokens: int, rows: int = 16
) -> tuple[tuple[float, ...], int]:
    """Continue prompts `[N, P]` greedily; return per exit how often it picks the same token, and the tokens counted.

    Tokens after an end of text do not count.
    """
    hits, count = torch.zeros(len(model.model.layers), dtype=torch.long), 0
    with evaluating(model):
        for batch in prompts.split(rows):
            text, counted = greedy(model, batch, new_tokens)
            start = batch.shape[1]
            picks = [logits[:, start - 1 : -1].argmax(-1) for logits in exit_logits(model, text)]
            for index, pick in enumerate(picks):
                hits[index] += ((pick == picks[-1]) & counted).sum().cpu()
            count += int(counted.sum())
    return tuple((hits / max(1, count)).tolist()), count


def greedy(model: LlamaForCausalLM, prompts: Tensor, new_tokens: int) -> tuple[Tensor, Tensor]:
    """Return prompts and greedy continuations `[N, P + new]`, and which new tokens `[N, new]` come before the end."""
    end: int = model.config.eos_token_id  # type: ignore[assignment]
    text: Tensor = model.generate(  # type: ignore[assignment,misc]
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=end,
    )
    ends = text[:, prompts.shape[1] :].eq(end).long()
    return text, ends.cumsum(1) - ends == 0


def held_out_windows(documents: Sequence[np.ndarray], length: int, limit: int) -> Tensor:
    """Cut documents into windows `[N, length]` and keep `limit` of them, spread evenly over all."""
    windows = [
        document[start : start + length]
        for document in documents
        for start in range(0, len(document) - length + 1, length)
    ]
    if not windows:
        raise ValueError(f"no held-out file has {length} tokens; raise corpus.held_out_percent or ask for shorter ones")
    chosen = np.linspace(0, len(windows) - 1, min(limit, len(windows))).round().astype(int)
    return torch.from_numpy(np.stack([windows[index] for index in chosen]))


def measure_exits(model: LlamaForCausalLM, documents: Sequence[np.ndarray], config: EvalConfig) -> ExitQuality:
    """Measure loss and agreement of every exit on held-out documents."""
    device = next(model.parameters()).device
    windows = held_out_windows(documents, config.window, config.num_windows).to(device)
    prompts = held_out_windows(documents, config.prompt_tokens, config.num_prompts).to(device)
    agreement, counted = exit_agreement(model, prompts, config.new_tokens)
    return ExitQuality(exit_losses(model, windows), agreement, windows[:, 1:].numel(), counted)
