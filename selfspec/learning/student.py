"""`Student`: exit heads in training, and their running average."""

from __future__ import annotations

import copy
from math import isfinite

import torch
from torch import Tensor

from selfspec.learning.examples import Batch
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.split_model import SplitModel

BETAS = (0.9, 0.99)  # of AdamW, for some hundred steps in all
WEIGHT_DECAY = 0.01
MOST_GRADIENT = 1.0  # norm to which gradients are clipped
LEAST_LOG_Q = -50.0  # lower bound of log probabilities, so that masked tokens give no NaN


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Cross entropy of the draft's `logits` `[n, vocab]` with the target's distribution, mean over positions.

    Its gradient is that of KL(target || draft), the loss of online speculative decoding (arXiv 2310.07177), over the
    target's most probable tokens and one bucket for all others.
    """
    others = logits.scatter(1, batch.tokens, float("-inf")).logsumexp(1, keepdim=True)
    log_q = torch.cat((logits.gather(1, batch.tokens), others), 1) - logits.logsumexp(1, keepdim=True)
    p = batch.log_p.exp()
    p = torch.cat((p, (1 - p.sum(1, keepdim=True)).clamp(min=0)), 1)
    return -(p * log_q.clamp(min=LEAST_LOG_Q)).sum(1).mean()


class Student:
    """Trains exit heads in float32. The model's weights get no gradients.

    Args:
        heads: the initial heads, which are copied.
        lr: learning rate.
        decay: decay of the running average per step.
    """

    def __init__(self, heads: ExitHeads, lr: float, decay: float) -> None:
        self.average = copy.deepcopy(heads).float().requires_grad_(False)
        """The running average of the heads, for drafting."""
        self._heads = copy.deepcopy(self.average).requires_grad_(True)
        self._decay = decay
        self._optimizer = torch.optim.AdamW(
            self._heads.parameters(), lr, BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )  # unfused costs several times a small head's arithmetic

    def step(self, split: SplitModel, layer: int, batch: Batch) -> bool:
        """Update one layer's head; False, without a change, where loss or gradient is not finite."""
        weights = list(self._heads.heads[str(layer)].parameters())
        with torch.enable_grad():
            adapted = self._heads(batch.hidden.float(), layer).to(split.dtype)
            loss = cross_entropy(split.head_logits(adapted, lacks_norm=True), batch)
            gradients = torch.autograd.grad(loss, weights)  # for these weights only
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        value, size = torch.stack([loss.detach(), norm]).tolist()
        if not (isfinite(value) and isfinite(size)):
            return False
        scale = MOST_GRADIENT / max(size, MOST_GRADIENT)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient * scale
            self._optimizer.step()  # other layers have no gradients and do not change
            for kept, weight in zip(self.average.heads[str(layer)].parameters(), weights, strict=True):
                weight.grad = None
                kept.lerp_(weight, 1 - self._decay)
        return True
