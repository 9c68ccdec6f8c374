"""The quality of every exit: loss on held-out text, and agreement with the last layer's greedy choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.backbone import find_parts, plain_model
from train.recipe import IGNORED, layer_outputs
from train.sections import EvalConfig


@dataclass(frozen=True, slots=True)
class ExitQuality:
    """Measured quality of exits 1..L, in order; the last entry is the whole model.

    Agreement is measured on the model's own greedy continuations, as in speculative decoding.
    """

    loss: tuple[float, ...]
    agreement: tuple[float, ...]
    loss_tokens: int
    agreement_tokens: int


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate a model without gradients, dropout and compiled layers; its state is restored afterwards."""
    was_training, layers = model.training, find_parts(model).layers
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


def exit_logits(model: nn.Module, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the logits `[B, T, V]` of exits 1..L for tokens `[B, T]`, through the final norm and head."""
    parts = find_parts(model)
    with layer_outputs(parts.layers, range(1, len(parts.layers) + 1)) as states:
        parts.body(input_ids=tokens, use_cache=False)
    for number in range(1, len(parts.layers) + 1):
        yield parts.head(parts.norm(states[number]))


def held_out_scores(
    model: nn.Module, windows: Tensor, rows: int = 8
) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Measure exits 1..L on given text.

    Args:
        windows: tokens `[N, T]`, or tokens and labels `[2, N, T]` with -100 where a token does not count.

    Returns:
        Losses in nats per token, agreement with the last layer's most probable token, and the number of tokens.
    """
    tokens, labels = windows if windows.ndim == 3 else (windows, windows)
    num_layers = len(find_parts(model).layers)
    total, hits, count = torch.zeros(num_layers, dtype=torch.float64), torch.zeros(num_layers, dtype=torch.long), 0
    with evaluating(model):
        for some, wanted in zip(tokens.split(rows), labels.split(rows), strict=True):
            targets = wanted[:, 1:].flatten()
            counted = targets != IGNORED
            picks = []
            for index, logits in enumerate(exit_logits(model, some)):
                logits = logits[:, :-1].flatten(0, 1)[counted].float()
                total[index] += F.cross_entropy(logits, targets[counted], reduction="sum").double().cpu()
                picks.append(logits.argmax(-1))
            hits += torch.stack([(pick == picks[-1]).sum() for pick in picks]).cpu()
            count += int(counted.sum())
    return tuple((total / max(1, count)).tolist()), tuple((hits / max(1, count)).tolist()), count


def exit_agreement(model: nn.Module, prompts: Tensor, new_tokens: int, rows: int = 16) -> tuple[tuple[float, ...], int]:
    """Continue prompts `[N, P]` greedily; return the agreement of exits 1..L, and the number of tokens.

    Tokens after an end-of-text token do not count.
    """
    hits, count = torch.zeros(len(find_parts(model).layers), dtype=torch.long), 0
    with evaluating(model):
        for batch in prompts.split(rows):
            text, counted = greedy(model, batch, new_tokens)
            start = batch.shape[1]
            picks = [logits[:, start - 1 : -1].argmax(-1) for logits in exit_logits(model, text)]
            for index, pick in enumerate(picks):
                hits[index] += ((pick == picks[-1]) & counted).sum().cpu()
            count += int(counted.sum())
    return tuple((hits / max(1, count)).tolist()), count


def greedy(model: nn.Module, prompts: Tensor, new_tokens: int) -> tuple[Tensor, Tensor]:
    """Return prompts with greedy continuations `[N, P + new]`, and which new tokens count, bool `[N, new]`."""
    plain = plain_model(model)
    ends = end_tokens(plain)
    text: Tensor = plain.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        do_sample=False,
        temperature=None,  # a base model's settings for sampling would give warnings
        top_p=None,
        top_k=None,
        pad_token_id=ends[0],
    )
    ended = torch.isin(text[:, prompts.shape[1] :], torch.tensor(ends, device=text.device)).long()
    return text, ended.cumsum(1) - ended == 0


def end_tokens(model: nn.Module) -> list[int]:
    """Return the end-of-text ids of the generation config, else of the model config; [0] if there are none."""
    plain = plain_model(model)
    for holder in (plain.generation_config, plain.config):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return [0]


def held_out_windows(documents: Sequence[np.ndarray], length: int, limit: int) -> Tensor:
    """Cut documents into windows and keep `limit` of them, at equal distances.

    Documents are tokens `[T]` and windows `[N, length]`, or tokens and labels `[2, T]` and `[2, N, length]`.

    Raises:
        ValueError: all documents are shorter than `length`.
    """
    windows = [
        document[..., start : start + length]
        for document in documents
        for start in range(0, document.shape[-1] - length + 1, length)
    ]
    if not windows:
        raise ValueError(
            f"no held-out text has {length} tokens; raise held_out_percent, or lower eval.window and eval.prompt_tokens"
        )
    chosen = np.linspace(0, len(windows) - 1, min(limit, len(windows))).round().astype(int)
    return torch.from_numpy(np.stack([windows[index] for index in chosen], axis=-2))


def measure_exits(model: nn.Module, documents: Sequence[np.ndarray], config: EvalConfig) -> ExitQuality:
    """Measure loss and agreement of every exit on held-out documents."""
    device = next(model.parameters()).device
    windows = held_out_windows(documents, config.window, config.num_windows).to(device)
    prompts = held_out_windows(documents, config.prompt_tokens, config.num_prompts).to(device)
    if prompts.ndim == 3:
        prompts = prompts[0]
    agreement, counted = exit_agreement(model, prompts, config.new_tokens)
    losses, _, loss_tokens = held_out_scores(model, windows)
    return ExitQuality(losses, agreement, loss_tokens, counted)
