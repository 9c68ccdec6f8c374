"""The quality of every exit: loss on texts, and agreement with the last layer's greedy choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.backbone import find_parts
from train.generate import continue_prompts
from train.recipe import IGNORED, layer_outputs


@dataclass(frozen=True, slots=True)
class ExitQuality:
    """Measured quality of exits 1..L, in order; the last entry is the whole model.

    Losses are nats per token. Agreement is measured on the model's own greedy continuations, as in speculative
    decoding.
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


def exit_logits(model: nn.Module, tokens: Tensor, wanted: Tensor) -> Iterator[Tensor]:
    """Yield the logits `[N, V]` of exits 1..L at N wanted positions, through the final norm and head.

    Args:
        tokens: int64 `[B, T]`.
        wanted: bool `[B, T]`.
    """
    parts = find_parts(model)
    with layer_outputs(parts.layers, range(1, len(parts.layers) + 1)) as states:
        parts.body(input_ids=tokens, use_cache=False)
    for number in range(1, len(parts.layers) + 1):
        yield parts.head(parts.norm(states[number][wanted]))


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
            counted = F.pad(wanted[:, 1:] != IGNORED, (0, 1))
            targets = wanted[:, 1:][counted[:, :-1]]
            picks = []
            for index, logits in enumerate(exit_logits(model, some, counted)):
                total[index] += F.cross_entropy(logits.float(), targets, reduction="sum").double().cpu()
                picks.append(logits.argmax(-1))
            hits += torch.stack([(pick == picks[-1]).sum() for pick in picks]).cpu()
            count += len(targets)
    return tuple((total / max(1, count)).tolist()), tuple((hits / max(1, count)).tolist()), count


def exit_agreement(
    model: nn.Module, prompts: Sequence[Sequence[int]], new_tokens: int, rows: int = 16
) -> tuple[tuple[float, ...], int]:
    """Continue prompts greedily; return the agreement of exits 1..L, and the number of tokens.

    An end-of-text token counts, and ends its continuation.
    """
    hits, count = torch.zeros(len(find_parts(model).layers), dtype=torch.long), 0
    device = next(model.parameters()).device
    with evaluating(model):
        for start in range(0, len(prompts), rows):
            some = prompts[start : start + rows]
            texts = [[*a, *b] for a, b in zip(some, continue_prompts(model, some, new_tokens), strict=True)]
            length = max(len(text) for text in texts)  # padding on the right changes nothing before it
            tokens = torch.tensor([text + [0] * (length - len(text)) for text in texts], device=device)
            places = torch.arange(length, device=device)
            firsts, lasts = (torch.tensor([len(e) - 1 for e in each], device=device)[:, None] for each in (some, texts))
            picks = [logits.argmax(-1) for logits in exit_logits(model, tokens, (places >= firsts) & (places < lasts))]
            hits += torch.stack([(pick == picks[-1]).sum() for pick in picks]).cpu()
            count += len(picks[-1])
    return tuple((hits / max(1, count)).tolist()), count


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
