"""Optimizers: Muon for the matrices of the layers with AdamW for everything else, or AdamW alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from train.sections import OptimConfig


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (arXiv 2502.16982) and AdamW as one optimizer."""

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        matrices, vectors, embeddings = [], [], []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim < 2:
                vectors.append(parameter)
            elif ".layers." in name:
                matrices.append(parameter)
            else:
                embeddings.append(parameter)
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                matrices, lr=config.muon_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                [
                    {"params": embeddings, "weight_decay": config.weight_decay},
                    {"params": vectors, "weight_decay": 0.0},
                ],
                lr=config.adamw_lr,
                betas=(0.9, 0.95),
                fused=True,
            ),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """Share the dictionaries of parameter groups between this optimizer and its parts, for schedulers."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


def plain_adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) for all trainable weights, with weight decay for matrices."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.adamw_lr, betas=(0.9, 0.95), fused=True
    )


def warmup_stable_decay(step: int, progress: float, warmup_steps: int, decay_fraction: float) -> float:
    """Factor on the learning rate: linear warmup, constant, and linear decay to 0 over the last `decay_fraction`.

    Args:
        step: 0-based.
        progress: 0..1, the part of the run before this step.
    """
    warmup = (step + 1) / (warmup_steps + 1)
    return max(0.0, min(1.0, warmup, (1 - progress) / decay_fraction))
