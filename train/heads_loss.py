"""The training loss of exit heads, and their agreement with the whole model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfspec.model.exit_heads import ExitHeads
from selfspec.model.stack import Stack
from train.heads_config import TextConfig
from train.heads_states import Batch, chunks, run_texts, with_rest
from train.heads_text import Text


class Agreement(NamedTuple):
    """Agreement of one exit with the whole model over held-out positions."""

    top1: float
    """Share of positions with the same most probable token: greedy acceptance."""
    accepted: float
    """Mean of the sum over tokens of min(p, q), at temperature 1: acceptance when sampling (arXiv 2211.17192)."""


def exit_losses(stack: Stack, heads: ExitHeads, batch: Batch) -> list[Tensor]:
    """The loss of each exit of the heads, a float32 scalar each.

    Forward KL divergence from the whole model's distribution p to the exit's distribution q (arXiv 2310.07177), over
    the most probable tokens of p and one bucket for all others.
    """
    log_p = batch.log_probs
    if log_p is None:
        assert batch.final is not None
        with torch.no_grad():
            log_p = stack.logits(batch.final).log_softmax(-1)
    losses = []
    for layer, hidden in zip(heads.layers, batch.hidden, strict=True):
        # The heads are float32; norm and head are the model's own, in its dtype, as in drafting.
        log_q = stack.logits(heads(hidden, layer).to(stack.dtype), layer).log_softmax(-1)
        if batch.ids is not None:
            log_q = with_rest(log_q.gather(-1, batch.ids))
        losses.append((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    return losses


@torch.no_grad()
def measure(
    stack: Stack, heads: ExitHeads | None, texts: Sequence[Text], exits: Sequence[int], config: TextConfig
) -> dict[int, Agreement]:
    """Agreement of exits with the whole model on texts, at positions that the model wrote, as in drafting.

    Args:
        heads: float32; they are measured in the model's dtype. None: exits without heads.
    """
    ready = None if heads is None else copy.deepcopy(heads).to(stack.device, stack.dtype)
    same, shared = torch.zeros(len(exits)), torch.zeros(len(exits))
    number = 0
    for seen in run_texts(stack, texts, [text.trained_positions(config, False) for text in texts], exits):
        assert seen.final is not None
        number += len(seen.final)
        for chunk in chunks(stack, len(seen.final)):
            p = stack.logits(seen.final[chunk]).softmax(-1)
            for index, layer in enumerate(exits):
                hidden = seen.hidden[index, chunk]
                q = stack.logits(hidden if ready is None else ready(hidden, layer), layer).softmax(-1)
                same[index] += (p.argmax(-1) == q.argmax(-1)).sum().cpu()
                shared[index] += torch.minimum(p, q).sum().cpu()
    found = zip(exits, (same / number).tolist(), (shared / number).tolist(), strict=True)
    return {layer: Agreement(top1, accepted) for layer, top1, accepted in found}
