"""`Student`: exit heads in training, and their running average."""

from __future__ import annotations

import copy
from collections import Counter
from math import isfinite

import torch

from selfspec.learning.agreement import exit_loss
from selfspec.learning.states import Positions
from selfspec.model.draft_vocabulary import Subset
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.split_model import SplitModel

BETAS = (0.9, 0.99)  # of AdamW, for some hundred steps in all
WEIGHT_DECAY = 0.01
MOST_GRADIENT = 1.0  # norm to which gradients are clipped
KL_STEPS = 100  # of a layer, the first ones, with the loss KL


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
        self._decay, self._steps = decay, Counter[int]()
        self._optimizer = torch.optim.AdamW(
            self._heads.parameters(), lr, BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )  # unfused costs several times a small head's arithmetic

    def step(self, split: SplitModel, layer: int, seen: Positions, subset: Subset | None) -> bool:
        """Update one layer's head; False, without a change, where loss or gradient is not finite.

        Args:
            seen: float32 and int64, `hidden` of this layer.
            subset: the draft vocabulary; None: the whole one.
        """
        weights = list(self._heads.heads[str(layer)].parameters())
        with torch.enable_grad():
            loss = exit_loss(split, self._heads, layer, seen, subset, self._steps[layer] < KL_STEPS)
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
        self._steps[layer] += 1
        return True
